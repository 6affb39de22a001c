{{/* Where weights and tokenizers lie in pods, and the volumes that bring them. */}}

{{/* Folder of the weights in an executor; empty where there are none. Argument: a pool. */}}
{{- define "holdback.model.path" -}}
{{- if .model.persistentVolumeClaim -}}/models/{{ .name }}{{- else -}}{{ .model.imagePath | default "" }}{{- end -}}
{{- end -}}

{{- define "holdback.model.volume" -}}
{{- with .model.persistentVolumeClaim }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .claimName | quote }}
    readOnly: true
{{- end }}
{{- end -}}

{{- define "holdback.model.mount" -}}
{{- if .model.persistentVolumeClaim }}
- name: model
  mountPath: {{ printf "/models/%s" .name | quote }}
  {{- with .model.persistentVolumeClaim.path }}
  subPath: {{ . | quote }}
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

{{/* Not empty where a pool's tokenizer lies among the weights, and gateways get a copy of its files. Argument: a pool. */}}
{{- define "holdback.tokenizer.isCopied" -}}
{{- if not (or .tokenizer.imagePath .tokenizer.configMap .tokenizer.persistentVolumeClaim) -}}
{{- if .model.persistentVolumeClaim -}}yes{{- end -}}
{{- end -}}
{{- end -}}

{{- define "holdback.tokenizer.volume" -}}
{{- if include "holdback.tokenizer.isCopied" . }}
- name: {{ printf "tokenizer-%s" .name | quote }}
  emptyDir: {}
- name: {{ printf "model-%s" .name | quote }}
  persistentVolumeClaim:
    claimName: {{ .model.persistentVolumeClaim.claimName | quote }}
    readOnly: true
{{- else if .tokenizer.configMap }}
- name: {{ printf "tokenizer-%s" .name | quote }}
  configMap:
    name: {{ .tokenizer.configMap | quote }}
{{- else if .tokenizer.persistentVolumeClaim }}
- name: {{ printf "tokenizer-%s" .name | quote }}
  persistentVolumeClaim:
    claimName: {{ .tokenizer.persistentVolumeClaim.claimName | quote }}
    readOnly: true
{{- end }}
{{- end -}}

{{- define "holdback.tokenizer.mount" -}}
{{- if or (include "holdback.tokenizer.isCopied" .) .tokenizer.configMap .tokenizer.persistentVolumeClaim }}
- name: {{ printf "tokenizer-%s" .name | quote }}
  mountPath: {{ printf "/tokenizers/%s" .name | quote }}
  {{- with dig "path" "" (.tokenizer.persistentVolumeClaim | default dict) }}
  subPath: {{ . | quote }}
  {{- end }}
  readOnly: true
{{- end }}
{{- end -}}

{{/*
A container that copies a tokenizer from among the weights before the gateway starts. Mounted one by one, a file that is
not there would keep the pod from starting, and models differ in which they have. Arguments: root, component, settings,
pool.
*/}}
{{- define "holdback.tokenizer.copy" -}}
- name: {{ printf "tokenizer-%s" .pool.name | quote }}
  {{- include "holdback.container" . | nindent 2 }}
  command:
    - sh
    - -ec
    - |
      for file in "$@"; do
        if [ -f "/models/{{ .pool.name }}/$file" ]; then
          cp -f "/models/{{ .pool.name }}/$file" "/tokenizers/{{ .pool.name }}/$file"
          echo "$file copied"
        else
          echo "$file is not there"
        fi
      done
    - copy
    {{- toYaml .pool.tokenizer.files | nindent 4 }}
  resources:
    requests: {cpu: 50m, memory: 32Mi}
    limits: {memory: 128Mi}
  volumeMounts:
    - name: {{ printf "tokenizer-%s" .pool.name | quote }}
      mountPath: {{ printf "/tokenizers/%s" .pool.name | quote }}
    - name: {{ printf "model-%s" .pool.name | quote }}
      mountPath: {{ printf "/models/%s" .pool.name | quote }}
      {{- with .pool.model.persistentVolumeClaim.path }}
      subPath: {{ . | quote }}
      {{- end }}
      readOnly: true
{{- end -}}
