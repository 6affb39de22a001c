{{/* What an executor's pod and the Job that compiles for it share. Arguments: root, pool, group. */}}

{{/* Processor, memory and devices. */}}
{{- define "holdback.executor.resources" -}}
{{- $resources := deepCopy .group.resources -}}
{{- if eq .group.device "neuron" -}}
{{- $limits := $resources.limits | default dict -}}
{{- $_ := set $limits .group.neuron.resource (int .group.neuron.count) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "holdback.executor.volumes" -}}
{{- include "holdback.volumes" (dict "root" .root "component" "executor" "pool" .pool "settings" .group "configMap" .group.fullname) }}
- name: cache
{{- if .group.compileCache.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .group.compileCache.existingClaim | quote }}
{{- else if .group.compileCache.size }}
  persistentVolumeClaim:
    claimName: {{ printf "%s-cache" .group.fullname | quote }}
{{- else }}
  emptyDir: {}
{{- end }}
{{- include "holdback.model.volume" .pool }}
{{- end -}}

{{- define "holdback.executor.mounts" -}}
{{- include "holdback.mounts" (dict "root" .root "component" "executor" "settings" .group) }}
- name: cache
  mountPath: /var/cache/holdback
{{- include "holdback.model.mount" .pool }}
{{- end -}}
