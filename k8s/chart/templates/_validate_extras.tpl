{{/* Variables, volumes and mounts of the values that would collide with the chart's or with each other. */}}

{{/* Arguments: where, settings, problems, and beyond those of every pod volumes and mounts (paths). */}}
{{- define "holdback.validate.extras" -}}
{{- $problems := .problems -}}
{{- $where := .where -}}
{{- $variables := list "HOME" "XDG_CACHE_HOME" -}}
{{- range .settings.extraEnv -}}
{{- if has .name $variables -}}
{{- $_ := set $problems (printf "%s.extraEnv has %s, which the chart or another entry sets; allowed: each name once" $where .name) true -}}
{{- else if regexMatch "^HOLDBACK_(GATEWAY|SCHEDULER|EXECUTOR)__" .name -}}
{{- $_ := set $problems (printf "%s.extraEnv has %s, a setting of the process; allowed: in config" $where .name) true -}}
{{- end -}}
{{- if and (hasKey . "value") (hasKey . "valueFrom") -}}
{{- $_ := set $problems (printf "%s.extraEnv has %s with value and valueFrom; allowed: one of them" $where .name) true -}}
{{- end -}}
{{- $variables = append $variables .name -}}
{{- end -}}
{{- $volumes := concat (list "config" "tmp" "tls") (.volumes | default list) -}}
{{- range .settings.extraVolumes -}}
{{- if has .name $volumes -}}
{{- $_ := set $problems (printf "%s.extraVolumes has %s, which the chart or another entry has; allowed: each name once" $where .name) true -}}
{{- end -}}
{{- $volumes = append $volumes .name -}}
{{- end -}}
{{- $paths := concat (list "/etc/holdback/config" "/etc/holdback/tls" "/tmp") (.mounts | default list) -}}
{{- range .settings.extraVolumeMounts -}}
{{- $path := clean .mountPath -}}
{{- if has $path $paths -}}
{{- $_ := set $problems (printf "%s.extraVolumeMounts has %s, which the chart or another entry mounts; allowed: each path once" $where $path) true -}}
{{- end -}}
{{- if not (has .name $volumes) -}}
{{- $_ := set $problems (printf "%s.extraVolumeMounts has %s, which is no volume; allowed: a name of extraVolumes" $where .name) true -}}
{{- end -}}
{{- $paths = append $paths $path -}}
{{- end -}}
{{- end -}}
