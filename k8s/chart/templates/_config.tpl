{{/* What each process is configured with, one YAML document per process. */}}

{{/* Settings of every process. Arguments: root, component. */}}
{{- define "holdback.config.common" -}}
{{- $ports := include "holdback.ports" .root | fromJson -}}
host: {{ .root.Values.network.listenAddress | quote }}
port: {{ get $ports .component | int }}
health_port: {{ $ports.health | int }}
{{- if .root.Values.metrics.enabled }}
metrics_port: {{ .root.Values.metrics.port | int }}
{{- end }}
{{- with .root.Values.tracing.otlpEndpoint }}
otlp_endpoint: {{ . | quote }}
{{- end }}
{{- if .root.Values.tls.enabled }}
tls_cert: /etc/holdback/tls/tls.crt
tls_key: /etc/holdback/tls/tls.key
tls_ca: /etc/holdback/tls/ca.crt
{{- if or (ne .component "gateway") .root.Values.tls.requireClientCertificates }}
tls_client_ca: /etc/holdback/tls/ca.crt
{{- end }}
{{- else }}
insecure_bind: true
{{- end }}
{{- end -}}

{{- define "holdback.config.gateway" -}}
{{- $ports := include "holdback.ports" . | fromJson -}}
{{- $config := include "holdback.config.common" (dict "root" . "component" "gateway") | fromYaml -}}
{{- $_ := set $config "http_port" (int $ports.http) -}}
{{- if .Values.gateway.apiKeys.existingSecret -}}
{{- $_ := set $config "api_keys" (printf "/etc/holdback/keys/%s" .Values.gateway.apiKeys.key) -}}
{{- end -}}
{{- $pools := list -}}
{{- range (include "holdback.pools" . | fromJson).pools -}}
{{- $tokenizer := include "holdback.tokenizer.path" . -}}
{{- $pools = append $pools (dict "served_model_names" .servedModelNames "scheduler" .schedulerAddress "tokenizer" $tokenizer) -}}
{{- end -}}
{{- $_ := set $config "pools" $pools -}}
{{- include "holdback.fill" (dict "dst" $config "src" .Values.gateway.config) -}}
{{- toYaml $config -}}
{{- end -}}

{{/* Arguments: root, pool. */}}
{{- define "holdback.config.scheduler" -}}
{{- $config := include "holdback.config.common" (dict "root" .root "component" "scheduler") | fromYaml -}}
{{- $_ := set $config "executor_allowed_cidrs" .root.Values.network.podCIDRs -}}
{{- $_ := set $config "served_model_name" (first .pool.servedModelNames) -}}
{{- if .root.Values.tls.enabled -}}
{{- $_ := set $config "tls_server_name" (include "holdback.executor.tlsName" .) -}}
{{- end -}}
{{- if and (eq (int .pool.numExecutors) 1) (not (hasKey .pool.scheduler.config "executor_loss_timeout_s")) -}}
{{- $_ := set $config "executor_loss_timeout_s" .pool.startupTimeoutSeconds -}}
{{- end -}}
{{- include "holdback.fill" (dict "dst" $config "src" .pool.scheduler.config) -}}
{{- toYaml $config -}}
{{- end -}}

{{/* Arguments: root, pool, group. */}}
{{- define "holdback.config.executor" -}}
{{- $config := include "holdback.config.common" (dict "root" .root "component" "executor") | fromYaml -}}
{{- $_ := set $config "scheduler" .pool.schedulerAddress -}}
{{- $_ := set $config "served_model_name" (first .pool.servedModelNames) -}}
{{- $_ := set $config "device" .group.device -}}
{{- $_ := set $config "tensor_parallel_size" (int .group.tensorParallelSize) -}}
{{- with include "holdback.model.path" .pool -}}
{{- $_ := set $config "model" . -}}
{{- end -}}
{{- $_ := set $config "compile_cache" "/var/cache/holdback/compiled" -}}
{{- if and (eq .group.device "neuron") (eq .group.neuron.resource "aws.amazon.com/neuron") -}}
{{- $last := sub (int .group.tensorParallelSize) 1 -}}
{{- $_ := set $config "neuron_cores" (ternary "0" (printf "0-%d" $last) (eq (int $last) 0)) -}}
{{- end -}}
{{- include "holdback.fill" (dict "dst" $config "src" .group.config) -}}
{{- toYaml $config -}}
{{- end -}}

{{/* A ConfigMap. Arguments: as of holdback.metadata, config. */}}
{{- define "holdback.configMap" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  {{- include "holdback.metadata" . | nindent 2 }}
data:
  {{ .component }}.yaml: |
    {{- .config | nindent 4 }}
{{- end -}}
