{{/*
What compares two values; single ones are values.schema.json's. Each check adds sentences to `problems`, a mapping whose
keys they are, so that one run tells all of them.
*/}}

{{- define "holdback.validate" -}}
{{- $problems := dict -}}
{{- include "holdback.validate.common" (dict "root" . "problems" $problems) -}}
{{- include "holdback.validate.tls" (dict "root" . "problems" $problems) -}}
{{- include "holdback.validate.gateway" (dict "root" . "problems" $problems) -}}
{{- include "holdback.validate.pools" (dict "root" . "problems" $problems) -}}
{{- with keys $problems | sortAlpha -}}
{{- fail (printf "\n- %s\n" (join "\n- " .)) -}}
{{- end -}}
{{- end -}}

{{- define "holdback.validate.tls" -}}
{{- $tls := .root.Values.tls -}}
{{- $secrets := values $tls.existingSecrets | compact -}}
{{- if not (kindIs "bool" $tls.enabled) -}}
{{- $_ := set .problems "tls.enabled is not set; allowed: true, with tls.certManager or tls.existingSecrets, or false, and then everything crosses the network in the clear" true -}}
{{- else if $tls.enabled -}}
{{- if and $tls.certManager.enabled $secrets -}}
{{- $_ := set .problems "tls.certManager.enabled and tls.existingSecrets are both set; allowed: one of them" true -}}
{{- else if and (not $tls.certManager.enabled) (not $secrets) -}}
{{- $_ := set .problems "tls.enabled is true, but neither tls.certManager.enabled nor tls.existingSecrets is set; allowed: one of them" true -}}
{{- else if and $secrets (ne (len $secrets) 3) -}}
{{- $_ := set .problems (printf "tls.existingSecrets has %d of 3; allowed: gateway, scheduler and executor" (len $secrets)) true -}}
{{- end -}}
{{- if and $tls.certManager.enabled (not $tls.certManager.issuerRef.name) -}}
{{- $_ := set .problems "tls.certManager.issuerRef.name is not set; allowed: the name of an issuer" true -}}
{{- end -}}
{{- if $tls.certManager.enabled -}}
{{- include "holdback.validate.durations" . -}}
{{- end -}}
{{- else if or $tls.certManager.enabled $secrets $tls.requireClientCertificates -}}
{{- $_ := set .problems "tls.enabled is false, but certificates are configured; allowed: true, or none of certManager.enabled, existingSecrets and requireClientCertificates" true -}}
{{- end -}}
{{- end -}}

{{/* Of certificates: cert-manager takes none shorter than an hour. */}}
{{- define "holdback.validate.durations" -}}
{{- $manager := .root.Values.tls.certManager -}}
{{- $duration := include "holdback.seconds" $manager.duration | float64 -}}
{{- $before := include "holdback.seconds" $manager.renewBefore | float64 -}}
{{- if lt $duration 3600.0 -}}
{{- $_ := set .problems (printf "tls.certManager.duration is %s; allowed: at least 1h" $manager.duration) true -}}
{{- end -}}
{{- if or (lt $before 300.0) (ge $before $duration) -}}
{{- $_ := set .problems (printf "tls.certManager.renewBefore is %s; allowed: at least 5m, and less than duration, which is %s" $manager.renewBefore $manager.duration) true -}}
{{- end -}}
{{- end -}}

{{/* A duration such as 1.5h in seconds. */}}
{{- define "holdback.seconds" -}}
{{- $unit := regexFind "[hms]$" . -}}
{{- mulf (trimSuffix $unit . | float64) (get (dict "h" 3600.0 "m" 60.0 "s" 1.0) $unit) -}}
{{- end -}}

{{/* As a scheduler does; for networks of IPv6 that is left to it. */}}
{{- define "holdback.validate.network" -}}
{{- $parts := splitList "/" .network -}}
{{- if not (contains ":" .network) -}}
{{- $address := 0 -}}
{{- range splitList "." (first $parts) -}}{{- $address = add (mul $address 256) (atoi .) -}}{{- end -}}
{{- $size := 1 -}}
{{- range until (sub 32 (last $parts | atoi) | int) -}}{{- $size = mul $size 2 -}}{{- end -}}
{{- if mod $address $size -}}
{{- $_ := set .problems (printf "network.podCIDRs has %s; allowed: networks without bits of a host" .network) true -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Who the processes run as; what a container has wins over what its pod has. */}}
{{- define "holdback.validate.user" -}}
{{- $context := dict -}}
{{- range list .root.Values.podSecurityContext .root.Values.containerSecurityContext -}}
{{- range $key, $value := . -}}{{- if not (kindIs "invalid" $value) -}}{{- $_ := set $context $key $value -}}{{- end -}}{{- end -}}
{{- end -}}
{{- if and $context.runAsNonRoot (hasKey $context "runAsUser") (eq (int64 $context.runAsUser) 0) -}}
{{- $_ := set .problems "podSecurityContext and containerSecurityContext have runAsUser 0 and runAsNonRoot; allowed: one of them" true -}}
{{- end -}}
{{- end -}}

{{/* Names of the release, ports, and what asks for metrics. */}}
{{- define "holdback.validate.common" -}}
{{- $problems := .problems -}}
{{- $prefix := include "holdback.fullname" .root -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $prefix) -}}
{{- $_ := set $problems (printf "the release and nameOverride make names that start with %s; allowed: small letters, digits and -, after a letter; set fullnameOverride" $prefix) true -}}
{{- end -}}
{{- include "holdback.validate.name" (dict "where" "the release" "name" (printf "%s-grpc" (include "holdback.gateway.name" .root)) "problems" $problems) -}}
{{- $network := .root.Values.network -}}
{{- if regexMatch "(?i)^((::ffff:)?127\\.|::1$|0*:.*:0*1$)" $network.listenAddress -}}
{{- $_ := set $problems (printf "network.listenAddress is %s, where only the pod itself reaches it; allowed: an address that others reach, as 0.0.0.0 and ::" $network.listenAddress) true -}}
{{- end -}}
{{- range $network.podCIDRs -}}
{{- include "holdback.validate.network" (dict "network" . "problems" $problems) -}}
{{- end -}}
{{- include "holdback.validate.user" . -}}
{{- $endpoint := .root.Values.tracing.otlpEndpoint -}}
{{- $port := regexFind ":[^:\\]]*$" (regexReplaceAll "^https?:" $endpoint "") | trimPrefix ":" -}}
{{- if and $port (or (not (regexMatch "^[0-9]{1,5}$" $port)) (lt (atoi $port) 1) (gt (atoi $port) 65535)) -}}
{{- $_ := set $problems (printf "tracing.otlpEndpoint is %s; allowed: http://HOST:PORT or https://HOST:PORT, with a port in [1, 65535]" $endpoint) true -}}
{{- end -}}
{{- $metrics := .root.Values.metrics -}}
{{- range $process, $port := include "holdback.ports" .root | fromJson -}}
{{- if and $metrics.enabled (eq (int $port) (int $metrics.port)) -}}
{{- $_ := set $problems (printf "metrics.port is %d, which is the port of %s; allowed: one of its own" (int $port) $process) true -}}
{{- end -}}
{{- end -}}
{{- $values := .root.Values -}}
{{- include "holdback.validate.labels" (dict "where" "commonLabels" "labels" $values.commonLabels "problems" $problems) -}}
{{- include "holdback.validate.annotations" (dict "where" "commonAnnotations" "annotations" $values.commonAnnotations "problems" $problems) -}}
{{- range list "podMonitor" "dashboard" "alerts" -}}
{{- include "holdback.validate.labels" (dict "where" (printf "metrics.%s.labels" .) "labels" (get $metrics .).labels "problems" $problems) -}}
{{- if and (not $metrics.enabled) (get $metrics .).enabled -}}
{{- $_ := set $problems (printf "metrics.%s.enabled is true, but metrics.enabled is false; allowed: both or neither" .) true -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "holdback.validate.gateway" -}}
{{- $gateway := .root.Values.gateway -}}
{{- $mounts := list "/etc/holdback/keys" -}}
{{- $volumes := list "keys" -}}
{{- $absent := ternary (list) (list "keys") (not (empty $gateway.apiKeys.existingSecret)) -}}
{{- range (include "holdback.pools" .root | fromJson).pools -}}
{{- $mounts = append $mounts (printf "/tokenizers/%s" .name) -}}
{{- $rendered := include "holdback.tokenizer.volume" . -}}
{{- range list (printf "tokenizer-%s" .name) (printf "model-%s" .name) -}}
{{- $volumes = append $volumes . -}}
{{- if not (contains (printf "- name: %q" .) $rendered) -}}{{- $absent = append $absent . -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- include "holdback.validate.process" (dict "root" .root "where" "gateway" "settings" $gateway "volumes" $volumes "absent" $absent "mounts" $mounts "problems" .problems) -}}
{{- $resources := $gateway.resources -}}
{{- if and (eq $gateway.autoscaling.type "hpa") (not (or (dig "requests" "cpu" "" $resources) (dig "limits" "cpu" "" $resources))) -}}
{{- $_ := set .problems "gateway.autoscaling.type is hpa, but gateway.resources.requests.cpu is not set, of which it takes a share; allowed: the type none, or with requests.cpu" true -}}
{{- end -}}
{{- include "holdback.validate.autoscaling" (dict "where" "gateway.autoscaling" "autoscaling" $gateway.autoscaling "problems" .problems) -}}
{{- $grace := $gateway.terminationGracePeriodSeconds -}}
{{- $needed := addf $gateway.preStopSeconds $gateway.config.drain_timeout_s -}}
{{- if and (not (kindIs "invalid" $grace)) (le (float64 $grace) (float64 $needed)) -}}
{{- $_ := set .problems (printf "gateway.terminationGracePeriodSeconds is %d; allowed: more than gateway.preStopSeconds and gateway.config.drain_timeout_s together, which are %v" (int $grace) $needed) true -}}
{{- end -}}
{{- $routes := $gateway.gatewayApi -}}
{{- if and $routes.http.parentRefs (deepEqual $routes.http $routes.grpc) -}}
{{- $_ := set .problems "gateway.gatewayApi.http and gateway.gatewayApi.grpc have the same parentRefs and hostnames; allowed: a listener or host names of their own, for a listener takes only one of the two" true -}}
{{- end -}}
{{- if and $gateway.ingress.enabled (not $gateway.ingress.hosts) -}}
{{- $_ := set .problems "gateway.ingress.enabled is true, but gateway.ingress.hosts is empty; allowed: at least one" true -}}
{{- end -}}
{{- end -}}

{{- define "holdback.validate.autoscaling" -}}
{{- if gt (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas) -}}
{{- $_ := set .problems (printf "%s.minReplicas is %d; allowed: at most maxReplicas, which is %d" .where (int .autoscaling.minReplicas) (int .autoscaling.maxReplicas)) true -}}
{{- end -}}
{{- end -}}

{{- define "holdback.validate.pools" -}}
{{- $problems := .problems -}}
{{- $root := .root -}}
{{- $pools := (include "holdback.pools" .root | fromJson).pools -}}
{{- if not $pools -}}
{{- $_ := set $problems "pools is empty; allowed: at least one pool, a model with its executors" true -}}
{{- end -}}
{{- $names := list -}}
{{- $served := list -}}
{{- $objects := dict -}}
{{- range $pool := $pools -}}
{{- $where := printf "pools[%s]" $pool.name -}}
{{- if has $pool.name $names -}}
{{- $_ := set $problems (printf "%s stands twice; allowed: each name once" $where) true -}}
{{- end -}}
{{- $names = append $names $pool.name -}}
{{- range $pool.servedModelNames -}}
{{- if has . $served -}}
{{- $_ := set $problems (printf "%s.servedModelNames has %q, which another pool or name has too; allowed: each once" $where .) true -}}
{{- end -}}
{{- $served = append $served . -}}
{{- end -}}
{{- include "holdback.validate.objects" (dict "objects" $objects "where" (printf "the scheduler of %s" $where) "name" $pool.schedulerName "problems" $problems) -}}
{{- range $pool.executors -}}
{{- include "holdback.validate.objects" (dict "objects" $objects "where" (printf "%s.executors[%s]" $where .name) "name" .fullname "problems" $problems) -}}
{{- end -}}
{{- include "holdback.validate.pool" (dict "root" $root "where" $where "pool" $pool "problems" $problems) -}}
{{- end -}}
{{- $engine := $root.Values.gateway.config.vllm_engine_model -}}
{{- if and $engine (not (has $engine $served)) -}}
{{- $_ := set $problems (printf "gateway.config.vllm_engine_model is %q; allowed: one of servedModelNames, which are %s" $engine (join ", " $served)) true -}}
{{- end -}}
{{- end -}}

{{- define "holdback.validate.pool" -}}
{{- $problems := .problems -}}
{{- $root := .root -}}
{{- $where := .where -}}
{{- $pool := .pool -}}
{{- include "holdback.validate.name" (dict "where" $where "name" $pool.schedulerName "problems" $problems) -}}
{{- $config := $pool.scheduler.config -}}
{{- $lease := dig "lease_timeout_s" 5 $config -}}
{{- $heartbeat := dig "heartbeat_interval_s" 1 $config -}}
{{- if le (float64 $lease) (float64 $heartbeat) -}}
{{- $_ := set $problems (printf "%s.scheduler.config.lease_timeout_s is %v; allowed: more than heartbeat_interval_s, which is %v" $where $lease $heartbeat) true -}}
{{- end -}}
{{- include "holdback.validate.stepTimeouts" (dict "where" (printf "%s.scheduler" $where) "config" $config "problems" $problems) -}}
{{- $tokenizers := pick $pool.tokenizer "persistentVolumeClaim" "configMap" "imagePath" | keys -}}
{{- if gt (len $tokenizers) 1 -}}
{{- $_ := set $problems (printf "%s.tokenizer has %s; allowed: one of them" $where (sortAlpha $tokenizers | join " and ")) true -}}
{{- else if not (or $tokenizers $pool.model) -}}
{{- $_ := set $problems (printf "%s has neither a tokenizer nor a model that has one; allowed: one of persistentVolumeClaim, configMap and imagePath of tokenizer" $where) true -}}
{{- end -}}
{{- if gt (len $pool.model) 1 -}}
{{- $_ := set $problems (printf "%s.model has %s; allowed: one of them" $where (keys $pool.model | sortAlpha | join " and ")) true -}}
{{- end -}}
{{- include "holdback.validate.name" (dict "where" $where "name" (include "holdback.executor.tlsName" .) "problems" $problems) -}}
{{- include "holdback.validate.process" (dict "root" $root "where" (printf "%s.scheduler" $where) "settings" $pool.scheduler "problems" $problems) -}}
{{- range $key, $claim := dict "model" $pool.model.persistentVolumeClaim "tokenizer" $pool.tokenizer.persistentVolumeClaim -}}
{{- include "holdback.validate.path" (dict "where" (printf "%s.%s.persistentVolumeClaim.path" $where $key) "path" (dig "path" "" ($claim | default dict)) "problems" $problems) -}}
{{- end -}}
{{- $scaled := list -}}
{{- range $pool.executors -}}
{{- if ne .autoscaling.type "none" -}}{{- $scaled = append $scaled .name -}}{{- end -}}
{{- end -}}
{{- if gt (len $scaled) 1 -}}
{{- $_ := set $problems (printf "%s.executors %s all have autoscaling; allowed: one group of a pool, for each would answer the load of the whole pool" $where (join " and " $scaled)) true -}}
{{- end -}}
{{- $names := list -}}
{{- $lengths := dict -}}
{{- range $group := $pool.executors -}}
{{- $here := printf "%s.executors[%s]" $where $group.name -}}
{{- if has $group.name $names -}}
{{- $_ := set $problems (printf "%s stands twice; allowed: each name once" $here) true -}}
{{- end -}}
{{- $names = append $names $group.name -}}
{{- with $group.config.max_model_len -}}
{{- $_ := set $lengths (int64 . | toString) true -}}
{{- end -}}
{{- $of := dict "root" $root "where" $here "pool" $pool "group" $group "problems" $problems -}}
{{- include "holdback.validate.group" $of -}}
{{- include "holdback.validate.limits" $of -}}
{{- end -}}
{{- with $config.max_model_len -}}
{{- $_ := set $lengths (int64 . | toString) true -}}
{{- end -}}
{{- if gt (len $lengths) 1 -}}
{{- $_ := set $problems (printf "%s has max_model_len %s; allowed: one for the scheduler and all its executors" $where (keys $lengths | sortAlpha | join " and ")) true -}}
{{- end -}}
{{- end -}}

{{- define "holdback.validate.name" -}}
{{- if gt (len .name) 63 -}}
{{- $_ := set .problems (printf "%s makes the name %s, which has %d characters; allowed: at most 63, by shorter names or fullnameOverride" .where .name (len .name)) true -}}
{{- end -}}
{{- end -}}

{{/* No two objects of a kind with one name. */}}
{{- define "holdback.validate.objects" -}}
{{- $other := get .objects .name -}}
{{- if and $other (ne $other .where) -}}
{{- $_ := set .problems (printf "%s makes the name %s, which %s makes too; allowed: names that differ when they are joined" .where .name $other) true -}}
{{- end -}}
{{- $_ := set .objects .name .where -}}
{{- end -}}

{{- define "holdback.validate.group" -}}
{{- $group := .group -}}
{{- include "holdback.validate.process" (dict "root" .root "where" .where "settings" $group "volumes" (list "cache" "model") "absent" (ternary (list) (list "model") (hasKey .pool.model "persistentVolumeClaim")) "mounts" (list "/var/cache/holdback" (printf "/models/%s" .pool.name)) "resources" (include "holdback.executor.resources" . | fromYaml) "problems" .problems) -}}
{{- $model := first .pool.servedModelNames -}}
{{- if and (eq $group.autoscaling.type "hpa") (not (regexMatch "^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$" $model)) -}}
{{- $_ := set .problems (printf "%s.autoscaling.type is hpa, but the first of servedModelNames, %q, is no label value, by which it asks for metrics; allowed: letters, digits, -, _ and ., at most 63 of them, or the type keda" .where $model) true -}}
{{- end -}}
{{- include "holdback.validate.name" (dict "where" .where "name" (printf "%s-compile-00000000" $group.fullname) "problems" .problems) -}}
{{- include "holdback.validate.autoscaling" (dict "where" (printf "%s.autoscaling" .where) "autoscaling" $group.autoscaling "problems" .problems) -}}
{{- if and (ne $group.device "simulated") (not .pool.model) -}}
{{- $_ := set .problems (printf "%s.device is %s, but its pool has no model; allowed: model.persistentVolumeClaim or model.imagePath" .where $group.device) true -}}
{{- end -}}
{{- $size := int $group.tensorParallelSize -}}
{{- if and (eq $group.device "simulated") (gt $size 1) -}}
{{- $_ := set .problems (printf "%s.tensorParallelSize is %d; allowed on the device simulated: 1" .where $size) true -}}
{{- end -}}
{{- if and (eq $group.device "neuron") (eq $group.neuron.resource "aws.amazon.com/neuroncore") (gt $size (int $group.neuron.count)) -}}
{{- $_ := set .problems (printf "%s.tensorParallelSize is %d; allowed: at most neuron.count, which is %d, for each process has a core" .where $size (int $group.neuron.count)) true -}}
{{- end -}}
{{- if and (regexMatch "^0+%?$" (toString $group.maxSurge)) (regexMatch "^0+%?$" (toString $group.maxUnavailable)) -}}
{{- $_ := set .problems (printf "%s.maxSurge and maxUnavailable are both 0; allowed: one of them" .where) true -}}
{{- end -}}
{{- if and (ne $group.autoscaling.type "none") (not .root.Values.metrics.enabled) -}}
{{- $_ := set .problems (printf "%s.autoscaling.type is %s, but metrics.enabled is false; allowed: none, or with metrics" .where $group.autoscaling.type) true -}}
{{- end -}}
{{- if and (eq $group.autoscaling.type "keda") (not $group.autoscaling.keda.serverAddress) -}}
{{- $_ := set .problems (printf "%s.autoscaling.keda.serverAddress is not set; allowed: the URL of Prometheus" .where) true -}}
{{- end -}}
{{- include "holdback.validate.stepTimeouts" (dict "where" .where "config" $group.config "problems" .problems) -}}
{{- $grace := $group.terminationGracePeriodSeconds -}}
{{- if and (not (kindIs "invalid" $grace)) (le (float64 $grace) (float64 $group.config.drain_timeout_s)) -}}
{{- $_ := set .problems (printf "%s.terminationGracePeriodSeconds is %d; allowed: more than config.drain_timeout_s, which is %v" .where (int $grace) $group.config.drain_timeout_s) true -}}
{{- end -}}
{{- if and $group.precompile.enabled (not (or $group.compileCache.existingClaim $group.compileCache.size)) -}}
{{- $_ := set .problems (printf "%s.precompile.enabled is true, but compileCache has no volume; allowed: with compileCache.existingClaim or compileCache.size" .where) true -}}
{{- end -}}
{{- if and $group.config.require_cached (not (or $group.compileCache.existingClaim $group.compileCache.size)) -}}
{{- $_ := set .problems (printf "%s.config.require_cached is true, but compileCache has no volume; allowed: with compileCache.existingClaim or compileCache.size" .where) true -}}
{{- end -}}
{{- end -}}
