{{/* Prefix of all names. */}}
{{- define "holdback.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- if contains $name .Release.Name -}}{{ .Release.Name }}{{- else -}}{{ .Release.Name }}-{{ $name }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "holdback.gateway.name" -}}{{ include "holdback.fullname" . }}-gateway{{- end -}}

{{/* Labels that select pods; they never change. Arguments: root, component, and for some pool and group. */}}
{{- define "holdback.selector" -}}
app.kubernetes.io/name: holdback
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
holdback/pool: {{ . | quote }}
{{- end }}
{{- with .group }}
holdback/group: {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "holdback.labels" -}}
{{ include "holdback.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* name, namespace, labels and annotations of an object. Arguments: as of holdback.selector, name, annotations, labels. */}}
{{- define "holdback.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "holdback.labels" . | nindent 2 }}
  {{- with merge (dict) (.labels | default dict) .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Image reference. Arguments: root, image. */}}
{{- define "holdback.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "holdback.serviceAccountName" -}}
{{- if .root.Values.serviceAccount.create -}}{{ include "holdback.fullname" .root }}-{{ .component }}{{- else -}}default{{- end -}}
{{- end -}}

{{/* Ports of the processes, the same in every pod. */}}
{{- define "holdback.ports" -}}
{{- dict "gateway" 50051 "scheduler" 50052 "executor" 50053 "http" 8000 "health" 50059 | toJson -}}
{{- end -}}
