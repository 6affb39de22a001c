{{/* What the values add to the chart's objects: what would collide with the chart's own or each other, or cannot be. */}}

{{/* Labels and annotations that the chart sets itself. Arguments: where, given (a mapping), own (names), problems. */}}
{{- define "holdback.validate.own" -}}
{{- $where := .where -}}
{{- $problems := .problems -}}
{{- $own := .own -}}
{{- range $key, $_ := .given -}}
{{- if has $key $own -}}
{{- $_ := set $problems (printf "%s has %s, which the chart sets itself; allowed: every other name" $where $key) true -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Arguments: where, labels, problems. */}}
{{- define "holdback.validate.labels" -}}
{{- $own := list "helm.sh/chart" "holdback/pool" "holdback/group" -}}
{{- range list "name" "instance" "component" "version" "managed-by" -}}
{{- $own = append $own (printf "app.kubernetes.io/%s" .) -}}
{{- end -}}
{{- include "holdback.validate.own" (dict "where" .where "given" .labels "own" $own "problems" .problems) -}}
{{- end -}}

{{/* Arguments: where, annotations, problems. */}}
{{- define "holdback.validate.annotations" -}}
{{- $own := list "checksum/config" "helm.sh/hook" "helm.sh/hook-delete-policy" -}}
{{- include "holdback.validate.own" (dict "where" .where "given" .annotations "own" $own "problems" .problems) -}}
{{- end -}}

{{/* A quantity as a number. */}}
{{- define "holdback.quantity" -}}
{{- $text := toString . -}}
{{- $number := regexFind "^[0-9.]+([eE][+-]?[0-9]+)?" $text -}}
{{- $factors := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 -}}
{{- $binary := 1.0 -}}
{{- range list "Ki" "Mi" "Gi" "Ti" "Pi" "Ei" -}}
{{- $binary = mulf $binary 1024.0 -}}
{{- $_ := set $factors . $binary -}}
{{- end -}}
{{- mulf (float64 $number) (get $factors (trimPrefix $number $text)) -}}
{{- end -}}

{{/* A folder of a volume. Arguments: where, path, problems. */}}
{{- define "holdback.validate.path" -}}
{{- if has ".." (splitList "/" .path) -}}
{{- $_ := set .problems (printf "%s is %s; allowed: a folder of the volume, without .." .where .path) true -}}
{{- end -}}
{{- end -}}

{{/* Arguments: where, resources, problems. */}}
{{- define "holdback.validate.resources" -}}
{{- $where := .where -}}
{{- $problems := .problems -}}
{{- $limits := .resources.limits | default dict -}}
{{- range $name, $request := .resources.requests -}}
{{- if and (contains "/" $name) (not (hasKey $limits $name)) -}}
{{- $_ := set $problems (printf "%s.resources.requests.%s is %v, but it has no limit; allowed: limits.%s of the same" $where $name $request $name) true -}}
{{- else if hasKey $limits $name -}}
{{- $limit := get $limits $name -}}
{{- $requested := include "holdback.quantity" $request | float64 -}}
{{- $most := include "holdback.quantity" $limit | float64 -}}
{{- if and (contains "/" $name) (ne $requested $most) -}}
{{- $_ := set $problems (printf "%s.resources.requests.%s is %v; allowed: limits.%s, which is %v, for devices are not shared" $where $name $request $name $limit) true -}}
{{- else if gt $requested $most -}}
{{- $_ := set $problems (printf "%s.resources.requests.%s is %v; allowed: at most limits.%s, which is %v" $where $name $request $name $limit) true -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
All of a process's pods. Arguments: root, where, settings, problems, and beyond those of every pod volumes, those of them
that are absent, and mounts.
*/}}
{{- define "holdback.validate.process" -}}
{{- include "holdback.validate.extras" . -}}
{{- include "holdback.validate.labels" (dict "where" (printf "%s.podLabels" .where) "labels" .settings.podLabels "problems" .problems) -}}
{{- include "holdback.validate.annotations" (dict "where" (printf "%s.podAnnotations" .where) "annotations" .settings.podAnnotations "problems" .problems) -}}
{{- include "holdback.validate.resources" (dict "where" .where "resources" (.resources | default .settings.resources) "problems" .problems) -}}
{{- end -}}

{{/* Arguments: as of holdback.validate.process. */}}
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
{{- if has .name (list "NEURON_RT_VISIBLE_CORES" "NEURON_RT_NUM_CORES") -}}
{{- $_ := set $problems (printf "%s.extraEnv has %s, which the device plugin or the chart names; allowed: neuron.resource, neuron.count and tensorParallelSize" $where .name) true -}}
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
{{- $kinds := omit . "name" | keys -}}
{{- if gt (len $kinds) 1 -}}
{{- $_ := set $problems (printf "%s.extraVolumes has %s with %s; allowed: one kind" $where .name (sortAlpha $kinds | join " and ")) true -}}
{{- end -}}
{{- end -}}
{{- $absent := concat (ternary (list) (list "tls") (eq (toString .root.Values.tls.enabled) "true")) (.absent | default list) -}}
{{- $paths := concat (list "/etc/holdback/config" "/etc/holdback/tls" "/tmp") (.mounts | default list) -}}
{{- range .settings.extraVolumeMounts -}}
{{- $path := clean .mountPath -}}
{{- if has $path $paths -}}
{{- $_ := set $problems (printf "%s.extraVolumeMounts has %s, which the chart or another entry mounts; allowed: each path once" $where $path) true -}}
{{- end -}}
{{- if or (not (has .name $volumes)) (has .name $absent) -}}
{{- $_ := set $problems (printf "%s.extraVolumeMounts has %s, which is no volume; allowed: a name of extraVolumes" $where .name) true -}}
{{- end -}}
{{- include "holdback.validate.path" (dict "where" (printf "%s.extraVolumeMounts.subPath" $where) "path" (.subPath | default "") "problems" $problems) -}}
{{- $paths = append $paths $path -}}
{{- end -}}
{{- end -}}

{{/* How long a step may run, of a scheduler or an executor. */}}
{{- define "holdback.validate.stepTimeouts" -}}
{{- $longest := dig "max_step_timeout_s" 600 .config -}}
{{- $shortest := dig "min_step_timeout_s" 10 .config -}}
{{- if lt (float64 $longest) (float64 $shortest) -}}
{{- $_ := set .problems (printf "%s.config.max_step_timeout_s is %v; allowed: at least min_step_timeout_s, which is %v" .where $longest $shortest) true -}}
{{- end -}}
{{- end -}}
