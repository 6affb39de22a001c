{{/*
Gives `dst` every key of `src` that it lacks, mapping by mapping. A key that is there stays as it is, with 0, false and
"" too, which sprig's merge would replace.
*/}}
{{- define "holdback.fill" -}}
{{- $dst := .dst -}}
{{- range $key, $value := .src -}}
{{- if not (hasKey $dst $key) -}}
{{- $_ := set $dst $key $value -}}
{{- else if and (kindIs "map" $value) (kindIs "map" (get $dst $key)) -}}
{{- include "holdback.fill" (dict "dst" (get $dst $key) "src" $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Takes away requests and limits that are null, by which a pool or a group has none where its defaults do. */}}
{{- define "holdback.dropNulls" -}}
{{- range pick . "requests" "limits" -}}
{{- $quantities := . -}}
{{- range $name, $quantity := $quantities -}}
{{- if kindIs "invalid" $quantity -}}{{- $_ := unset $quantities $name -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Takes from `defaults` the kinds that `chosen` does not have, if it has one: a pool whose model is in the image has no
claim for it, also where poolDefaults has one. Arguments: chosen, defaults, kinds.
*/}}
{{- define "holdback.chooseKind" -}}
{{- $chosen := .chosen | default dict -}}
{{- $defaults := .defaults -}}
{{- $isChosen := false -}}
{{- range .kinds -}}{{- $isChosen = or $isChosen (hasKey $chosen .) -}}{{- end -}}
{{- range .kinds -}}
{{- if and $isChosen (not (hasKey $chosen .)) -}}{{- $_ := unset $defaults . -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/*
All pools with what they leave out filled in, as JSON `{"pools": [...]}`, and beside it what is derived once:
schedulerName, schedulerAddress, numExecutors (guaranteed ones) of a pool; fullname, guaranteed of a group.
*/}}
{{- define "holdback.pools" -}}
{{- $root := . -}}
{{- $prefix := include "holdback.fullname" . -}}
{{- $port := (include "holdback.ports" . | fromJson).scheduler | int -}}
{{- $pools := list -}}
{{- range .Values.pools -}}
{{- $pool := deepCopy . -}}
{{- $defaults := deepCopy $root.Values.poolDefaults -}}
{{- include "holdback.chooseKind" (dict "chosen" $pool.model "defaults" $defaults.model "kinds" (list "persistentVolumeClaim" "imagePath")) -}}
{{- include "holdback.chooseKind" (dict "chosen" $pool.tokenizer "defaults" $defaults.tokenizer "kinds" (list "persistentVolumeClaim" "configMap" "imagePath")) -}}
{{- include "holdback.fill" (dict "dst" $pool "src" $defaults) -}}
{{- include "holdback.dropNulls" $pool.scheduler.resources -}}
{{- $scheduler := printf "%s-%s-scheduler" $prefix $pool.name -}}
{{- $_ := set $pool "schedulerName" $scheduler -}}
{{- $_ := set $pool "schedulerAddress" (printf "%s.%s.svc:%d" $scheduler $root.Release.Namespace $port) -}}
{{- $groups := list -}}
{{- $numExecutors := 0 -}}
{{- /* Of the groups that have executors, or where none has, of all. */ -}}
{{- $startup := 0 -}}
{{- $longest := 0 -}}
{{- range $pool.executors -}}
{{- $group := . -}}
{{- include "holdback.fill" (dict "dst" $group "src" (deepCopy $root.Values.executorDefaults)) -}}
{{- include "holdback.dropNulls" $group.resources -}}
{{- $_ := set $group "fullname" (printf "%s-%s-%s" $prefix $pool.name $group.name) -}}
{{- $guaranteed := ternary $group.replicas $group.autoscaling.minReplicas (eq $group.autoscaling.type "none") | int -}}
{{- $_ := set $group "guaranteed" $guaranteed -}}
{{- $numExecutors = add $numExecutors $guaranteed -}}
{{- $longest = max $longest (int $group.startupTimeoutSeconds) -}}
{{- if gt $guaranteed 0 -}}
{{- $startup = max $startup (int $group.startupTimeoutSeconds) -}}
{{- end -}}
{{- $groups = append $groups $group -}}
{{- end -}}
{{- $_ := set $pool "executors" $groups -}}
{{- $_ := set $pool "numExecutors" $numExecutors -}}
{{- $_ := set $pool "startupTimeoutSeconds" ($startup | default $longest) -}}
{{- $pools = append $pools $pool -}}
{{- end -}}
{{- dict "pools" $pools | toJson -}}
{{- end -}}
