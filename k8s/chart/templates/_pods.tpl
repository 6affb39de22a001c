{{/* What all pods have in common. */}}

{{/* Start of a pod's spec. Arguments: root, component, settings (of the process), grace. */}}
{{- define "holdback.pod" -}}
serviceAccountName: {{ include "holdback.serviceAccountName" . | quote }}
automountServiceAccountToken: false
# Variables that Kubernetes makes of Services would only clutter the environment.
enableServiceLinks: false
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
terminationGracePeriodSeconds: {{ .grace }}
{{- with .settings.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Spread over nodes. Arguments: as of holdback.selector, settings. */}}
{{- define "holdback.spread" -}}
topologySpreadConstraints:
{{- if .settings.topologySpreadConstraints }}
  {{- toYaml .settings.topologySpreadConstraints | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "holdback.selector" . | nindent 8 }}
{{- end }}
{{- end -}}

{{/* Labels and annotations of a pod. Arguments: as of holdback.selector, settings, config. */}}
{{- define "holdback.podMetadata" -}}
labels:
  {{- include "holdback.selector" . | nindent 2 }}
  {{- with merge (dict) .settings.podLabels .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  # Another configuration is another pod.
  checksum/config: {{ .config | sha256sum | quote }}
  {{- with merge (dict) .settings.podAnnotations .root.Values.commonAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Start of a container, up to its environment. Arguments: root, component, settings. */}}
{{- define "holdback.container" -}}
image: {{ include "holdback.image" (dict "root" .root "image" .settings.image) | quote }}
imagePullPolicy: {{ .settings.image.pullPolicy }}
securityContext:
  {{- toYaml .root.Values.containerSecurityContext | nindent 2 }}
{{- end -}}

{{/* Probes by gRPC, on a port that serves nothing else. Arguments: startup (a service), startupSeconds. */}}
{{- define "holdback.probes" -}}
startupProbe:
  grpc: {port: 50059, service: {{ .startup }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add (int .startupSeconds) 4) 5 }}
# Whether its event loop turns, whatever becomes of the other processes.
livenessProbe:
  grpc: {port: 50059, service: liveness}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
# Whether a request sent now would be served.
readinessProbe:
  grpc: {port: 50059, service: readiness}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
{{- end -}}

{{- define "holdback.metricsPort" -}}
{{- if .Values.metrics.enabled }}
- name: metrics
  containerPort: {{ .Values.metrics.port | int }}
{{- end }}
{{- end -}}

{{/* Variables of every container. Arguments: component, settings. */}}
{{- define "holdback.env" -}}
- name: HOME
  value: /tmp
- name: XDG_CACHE_HOME
  value: /var/cache/holdback
{{- with .settings.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Volumes of every pod. Arguments: root, component, settings, configMap, and for some pool. */}}
{{- define "holdback.volumes" -}}
- name: config
  configMap:
    name: {{ .configMap | quote }}
- name: tmp
  emptyDir: {}
{{- include "holdback.tls.volume" . }}
{{- with .settings.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Arguments: root, component, settings. */}}
{{- define "holdback.mounts" -}}
- name: config
  mountPath: /etc/holdback/config
  readOnly: true
- name: tmp
  mountPath: /tmp
{{- include "holdback.tls.mount" . }}
{{- with .settings.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Egress that every pod needs: names, and what the operator adds. */}}
{{- define "holdback.egress" -}}
# 5353 is where OpenShift's name servers listen behind their Service.
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
    - {port: 5353, protocol: UDP}
    - {port: 5353, protocol: TCP}
{{- with .Values.networkPolicy.extraEgress }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Ingress that every pod allows: probes, and Prometheus. */}}
{{- define "holdback.ingress" -}}
# Probes come from the node, whose address no policy can name; the port serves nothing else.
- ports: [{port: 50059}]
{{- if .Values.metrics.enabled }}
- ports: [{port: {{ .Values.metrics.port | int }}}]
  {{- with .Values.networkPolicy.metricsFrom }}
  from:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "holdback.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "holdback.metadata" (dict "root" .root "component" .component "name" (include "holdback.serviceAccountName" .) "annotations" .root.Values.serviceAccount.annotations) | nindent 2 }}
automountServiceAccountToken: false
{{- end -}}

{{/* A PodDisruptionBudget. Arguments: as of holdback.metadata. */}}
{{- define "holdback.podDisruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "holdback.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  # A pod that is not ready serves nobody, and may go.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "holdback.selector" . | nindent 6 }}
{{- end -}}

{{/* Grace periods, in whole seconds: what is set, else what the drain needs and some more for the end of calls. */}}
{{- define "holdback.gateway.grace" -}}
{{- if kindIs "invalid" .Values.gateway.terminationGracePeriodSeconds -}}
{{ add (int .Values.gateway.preStopSeconds) (ceil .Values.gateway.config.drain_timeout_s | int) 15 }}
{{- else -}}
{{ int .Values.gateway.terminationGracePeriodSeconds }}
{{- end -}}
{{- end -}}

{{- define "holdback.executor.grace" -}}
{{- if kindIs "invalid" .terminationGracePeriodSeconds -}}
{{ add (ceil .config.drain_timeout_s | int) 25 }}
{{- else -}}
{{ int .terminationGracePeriodSeconds }}
{{- end -}}
{{- end -}}
