{{/* Where weights and tokenizers lie in pods, and the volumes that bring them. */}}

{{/* Folder of the weights in an executor; empty where there are none. Argument: a pool. */}}
{{- define "holdback.model.path" -}}
{{- if .model.persistentVolumeClaim -}}/models/{{ .name }}{{- else -}}{{ .model.imagePath | default "" }}{{- end -}}
{{- end -}}

{{- define "holdback.model.volume" -}}
{{- with .model.persistentVolumeClaim }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .claimName }}
    readOnly: true
{{- end }}
{{- end -}}

{{- define "holdback.model.mount" -}}
{{- if .model.persistentVolumeClaim }}
- name: model
  mountPath: /models/{{ .name }}
  {{- with .model.persistentVolumeClaim.path }}
  subPath: {{ . }}
  {{- end }}
  readOnly: true
{{- end }}
{{- end -}}

{{/* Folder of a pool's tokenizer in a gateway. Argument: a pool. */}}
{{- define "holdback.tokenizer.path" -}}
{{- if .tokenizer.imagePath -}}
{{ .tokenizer.imagePath }}
{{- else if or .tokenizer.persistentVolumeClaim .tokenizer.configMap .model.persistentVolumeClaim -}}
/tokenizers/{{ .name }}
{{- else -}}
{{ .model.imagePath | default "" }}
{{- end -}}
{{- end -}}

{{- define "holdback.tokenizer.volume" -}}
{{- if .tokenizer.imagePath }}
{{- else if .tokenizer.configMap }}
- name: tokenizer-{{ .name }}
  configMap:
    name: {{ .tokenizer.configMap }}
{{- else }}
{{- with .tokenizer.persistentVolumeClaim | default .model.persistentVolumeClaim }}
- name: tokenizer-{{ $.name }}
  persistentVolumeClaim:
    claimName: {{ .claimName }}
    readOnly: true
{{- end }}
{{- end }}
{{- end -}}

{{/* A folder of its own is mounted whole; of the model's volume only the files that are named, so no weights. */}}
{{- define "holdback.tokenizer.mount" -}}
{{- $pool := . }}
{{- if .tokenizer.imagePath }}
{{- else if or .tokenizer.configMap .tokenizer.persistentVolumeClaim }}
- name: tokenizer-{{ .name }}
  mountPath: /tokenizers/{{ .name }}
  {{- with dig "path" "" (.tokenizer.persistentVolumeClaim | default dict) }}
  subPath: {{ . }}
  {{- end }}
  readOnly: true
{{- else if .model.persistentVolumeClaim }}
{{- range .tokenizer.files }}
- name: tokenizer-{{ $pool.name }}
  mountPath: /tokenizers/{{ $pool.name }}/{{ . }}
  subPath: {{ list $pool.model.persistentVolumeClaim.path . | compact | join "/" }}
  readOnly: true
{{- end }}
{{- end }}
{{- end -}}
