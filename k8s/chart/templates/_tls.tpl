{{/* Secret with the certificate of a process. Arguments: root, component, and for scheduler and executor the pool. */}}
{{- define "holdback.tls.secret" -}}
{{- if .root.Values.tls.certManager.enabled -}}
{{ include "holdback.tls.name" . }}
{{- else -}}
{{ get .root.Values.tls.existingSecrets .component }}
{{- end -}}
{{- end -}}

{{/* Name of its Certificate, and of the secret that cert-manager makes. */}}
{{- define "holdback.tls.name" -}}
{{ include "holdback.fullname" .root }}-{{ with .pool }}{{ .name }}-{{ end }}{{ .component }}-tls
{{- end -}}

{{/* The one name in the certificates of all executors of a pool, which are dialled by address. Arguments: root, pool. */}}
{{- define "holdback.executor.tlsName" -}}
{{ include "holdback.fullname" .root }}-{{ .pool.name }}-executor
{{- end -}}

{{/* Names that the certificate must have, as JSON `{"names": [...]}`. Arguments: as of holdback.tls.secret. */}}
{{- define "holdback.tls.dnsNames" -}}
{{- $root := .root -}}
{{- $names := list -}}
{{- if eq .component "executor" -}}
{{- $names = list (include "holdback.executor.tlsName" .) -}}
{{- else -}}
{{- $services := ternary (list (include "holdback.gateway.name" $root) (printf "%s-grpc" (include "holdback.gateway.name" $root))) (list (dig "schedulerName" "" (.pool | default dict))) (eq .component "gateway") -}}
{{- range $services -}}
{{- $names = concat $names (list . (printf "%s.%s" . $root.Release.Namespace) (printf "%s.%s.svc" . $root.Release.Namespace) (printf "%s.%s.svc.%s" . $root.Release.Namespace $root.Values.network.clusterDomain)) -}}
{{- end -}}
{{- if eq .component "gateway" -}}
{{- $names = concat $names $root.Values.tls.certManager.gatewayDnsNames -}}
{{- end -}}
{{- end -}}
{{- dict "names" $names | toJson -}}
{{- end -}}

{{- define "holdback.tls.volume" -}}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "holdback.tls.secret" . | quote }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{- define "holdback.tls.mount" -}}
{{- if .root.Values.tls.enabled }}
- name: tls
  mountPath: /etc/holdback/tls
  readOnly: true
{{- end }}
{{- end -}}

{{/* A Certificate of cert-manager. Arguments: as of holdback.tls.secret. */}}
{{- define "holdback.certificate" -}}
{{- $manager := .root.Values.tls.certManager -}}
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  {{- $pool := dig "name" "" (.pool | default dict) }}
  {{- include "holdback.metadata" (dict "root" .root "component" .component "pool" $pool "name" (include "holdback.tls.name" .)) | nindent 2 }}
spec:
  secretName: {{ include "holdback.tls.name" . | quote }}
  duration: {{ $manager.duration | quote }}
  renewBefore: {{ $manager.renewBefore | quote }}
  privateKey:
    algorithm: ECDSA
    size: 256
    rotationPolicy: Always
  usages: [digital signature, server auth, client auth]
  dnsNames:
    {{- toYaml (include "holdback.tls.dnsNames" . | fromJson).names | nindent 4 }}
  issuerRef:
    {{- toYaml $manager.issuerRef | nindent 4 }}
{{- end -}}
