{{/*
What an executor would refuse of its shapes and its KV memory when it starts, as far as the values alone show it: the
rules of K1 and K2, and what each device asks beyond them. A test compares both, for random values.
*/}}

{{/* Arguments: where, group, problems. */}}
{{- define "holdback.validate.limits" -}}
{{- $of := merge (dict "limits" (include "holdback.limits" .group | fromJson)) . -}}
{{- include "holdback.validate.buckets" $of -}}
{{- include "holdback.validate.contexts" $of -}}
{{- if eq .group.device "neuron" -}}
{{- include "holdback.validate.segments" $of -}}
{{- end -}}
{{- include "holdback.validate.kv" $of -}}
{{- if eq .group.device "simulated" -}}
{{- include "holdback.validate.tokenIds" . -}}
{{- end -}}
{{- end -}}

{{/*
The process's defaults filled in, as JSON: seqs and tokens (of a step), length (of a request; 0: the model's, which is
not known here, unless the buckets leave one only), blockSize. Argument: a group.
*/}}
{{- define "holdback.limits" -}}
{{- $config := .config -}}
{{- $seqs := $config.max_num_seqs | default (last ($config.num_seqs_buckets | default (list 32))) -}}
{{- $default := ternary 2048 512 (eq .device "neuron") -}}
{{- $tokens := $config.max_num_batched_tokens | default (last ($config.num_batched_tokens_buckets | default (list $default))) -}}
{{- $length := $config.max_model_len | default (ternary 2048 0 (eq .device "simulated")) -}}
{{- with $config.num_batched_tokens_buckets -}}
{{- if and (not $length) (lt (int (last .)) (int $tokens)) -}}
{{- $length = last . -}}
{{- end -}}
{{- end -}}
{{- dict "seqs" (int $seqs) "tokens" (int $tokens) "length" (int $length) "blockSize" (int ($config.block_size | default 16)) | toJson -}}
{{- end -}}

{{/* Decision K2: strictly ascending, and the last is what a step may be at most. */}}
{{- define "holdback.validate.buckets" -}}
{{- $problems := .problems -}}
{{- $where := .where -}}
{{- $config := .group.config -}}
{{- $limits := .limits -}}
{{- range $key := list "num_batched_tokens_buckets" "num_seqs_buckets" "decode_context_length_buckets" -}}
{{- $last := 0 -}}
{{- range get $config $key | default list -}}
{{- if le (int .) (int $last) -}}
{{- $_ := set $problems (printf "%s.config.%s has %d after %d; allowed: strictly ascending" $where $key (int .) (int $last)) true -}}
{{- end -}}
{{- $last = . -}}
{{- end -}}
{{- end -}}
{{- $tokens := int $limits.tokens -}}
{{- $largest := ternary (min $tokens (int $limits.length)) $tokens (gt (int $limits.length) 0) -}}
{{- with $config.num_batched_tokens_buckets -}}
{{- $last := int (last .) -}}
{{- if and (ne $last (int $largest)) (or $limits.length (gt $last (int $largest))) -}}
{{- $_ := set $problems (printf "%s.config.num_batched_tokens_buckets ends with %d; allowed: the smaller of max_num_batched_tokens and max_model_len, which is %d" $where $last (int $largest)) true -}}
{{- end -}}
{{- end -}}
{{- with $config.num_seqs_buckets -}}
{{- if ne (int (last .)) (int $limits.seqs) -}}
{{- $_ := set $problems (printf "%s.config.num_seqs_buckets ends with %d; allowed: max_num_seqs, which is %d" $where (int (last .)) (int $limits.seqs)) true -}}
{{- end -}}
{{- end -}}
{{- if lt $tokens (int $limits.seqs) -}}
{{- $_ := set $problems (printf "%s.config.max_num_batched_tokens is %d; allowed: at least max_num_seqs, which is %d" $where $tokens (int $limits.seqs)) true -}}
{{- end -}}
{{- end -}}

{{/* Shapes of contexts, to which the executor adds max_model_len. */}}
{{- define "holdback.validate.contexts" -}}
{{- $problems := .problems -}}
{{- $where := .where -}}
{{- $contexts := .group.config.decode_context_length_buckets | default list -}}
{{- $length := int .limits.length -}}
{{- if and (eq .group.device "cpu") $contexts -}}
{{- $_ := set $problems (printf "%s.config.decode_context_length_buckets is set; allowed on the device cpu: none" $where) true -}}
{{- else if $length -}}
{{- range $contexts -}}
{{- if gt (int .) $length -}}
{{- $_ := set $problems (printf "%s.config.decode_context_length_buckets has %d; allowed: at most max_model_len, which is %d" $where (int .) $length) true -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq .group.device "neuron" -}}
{{- range $contexts -}}
{{- if mod (int .) 128 -}}
{{- $_ := set $problems (printf "%s.config.decode_context_length_buckets has %d; allowed on the device neuron: multiples of 128" $where (int .)) true -}}
{{- end -}}
{{- end -}}
{{- if mod $length 128 -}}
{{- $_ := set $problems (printf "%s.config.max_model_len is %d; allowed on the device neuron: multiples of 128" $where $length) true -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
What the device neuron asks of prefill shapes. Without buckets these are the powers of two from 512 to the smaller of
max_num_batched_tokens and max_model_len, and that.
*/}}
{{- define "holdback.validate.segments" -}}
{{- $problems := .problems -}}
{{- $where := .where -}}
{{- $limits := .limits -}}
{{- $given := .group.config.num_batched_tokens_buckets -}}
{{- $blockSize := int $limits.blockSize -}}
{{- range $given -}}
{{- if or (lt (int .) 512) (gt (int .) 4096) (mod (int .) $blockSize) -}}
{{- $_ := set $problems (printf "%s.config.num_batched_tokens_buckets has %d; allowed on the device neuron: multiples of block_size, which is %d, in [512, 4096]" $where (int .) $blockSize) true -}}
{{- end -}}
{{- end -}}
{{- if not $given -}}
{{- $length := int $limits.length -}}
{{- $name := ternary "max_model_len" "max_num_batched_tokens" (and (gt $length 0) (lt $length (int $limits.tokens))) -}}
{{- $largest := ternary $length (int $limits.tokens) (eq $name "max_model_len") -}}
{{- /* Of a model that is not known, requests may be short enough, but never shorter than a segment. */ -}}
{{- if or (lt $largest 512) (and $length (or (gt $largest 4096) (mod $largest $blockSize))) -}}
{{- $_ := set $problems (printf "%s.config.%s is %d, which becomes a prefill bucket; allowed on the device neuron: multiples of block_size, which is %d, in [512, 4096]" $where $name $largest $blockSize) true -}}
{{- else if mod 512 $blockSize -}}
{{- $_ := set $problems (printf "%s.config.block_size is %d; allowed on the device neuron: what divides 512, the smallest prefill bucket by default" $where $blockSize) true -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Decision K1: one request of max_model_len must fit. And one setting at most says how much memory there is. */}}
{{- define "holdback.validate.kv" -}}
{{- $problems := .problems -}}
{{- $where := .where -}}
{{- $config := .group.config -}}
{{- $limits := .limits -}}
{{- $sizes := list -}}
{{- range list "num_blocks" "kv_cache_bytes" "kv_memory_fraction" -}}
{{- if and (hasKey $config .) (not (kindIs "invalid" (get $config .))) -}}{{- $sizes = append $sizes . -}}{{- end -}}
{{- end -}}
{{- if gt (len $sizes) 1 -}}
{{- $_ := set $problems (printf "%s.config has %s; allowed: one of them" $where (join " and " $sizes)) true -}}
{{- end -}}
{{- if and (eq .group.device "simulated") (without $sizes "num_blocks") -}}
{{- $_ := set $problems (printf "%s.config has %s; allowed on the device simulated: num_blocks" $where (join " and " $sizes)) true -}}
{{- end -}}
{{- $hasBudget := or (has "kv_memory_fraction" $sizes) (and (eq .group.device "neuron") (not $sizes)) -}}
{{- range list "kv_memory_cap_fraction" "kv_memory_min_bytes" -}}
{{- if and (hasKey $config .) (not (kindIs "invalid" (get $config .))) (not $hasBudget) -}}
{{- $_ := set $problems (printf "%s.config.%s is %s, which nothing goes by; allowed: with kv_memory_fraction" $where . (get $config . | toJson)) true -}}
{{- end -}}
{{- end -}}
{{- if has "num_blocks" $sizes -}}
{{- $length := int $limits.length -}}
{{- $of := printf "max_model_len, which is %d" $length -}}
{{- if not $length -}}
{{- /* The shortest that these shapes leave, of whatever model. */ -}}
{{- $length = max (ternary 512 2 (eq .group.device "neuron")) (int (last ($config.num_batched_tokens_buckets | default (list 0)))) (int (last ($config.decode_context_length_buckets | default (list 0)))) | int -}}
{{- $of = printf "%d tokens, of which no model has fewer here" $length -}}
{{- end -}}
{{- $blockSize := int $limits.blockSize -}}
{{- $needed := add 1 (div (sub (add $length $blockSize) 1) $blockSize) -}}
{{- if lt (int $config.num_blocks) (int $needed) -}}
{{- $_ := set $problems (printf "%s.config.num_blocks is %d; allowed: at least %d, for one request of %s, and block 0" $where (int $config.num_blocks) $needed $of) true -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Tokens that the simulated device knows; with a model these are the model's, unless the values say how many. */}}
{{- define "holdback.validate.tokenIds" -}}
{{- $problems := .problems -}}
{{- $where := .where -}}
{{- $config := .group.config -}}
{{- $size := $config.simulated_vocab_size | default (ternary 0 32000 (not (empty .pool.model))) | int -}}
{{- $given := dict "simulated_eos_token_ids" ($config.simulated_eos_token_ids | default list) -}}
{{- range list "simulated_nan_token_id" "simulated_error_token_id" "simulated_hang_token_id" -}}
{{- if and (hasKey $config .) (not (kindIs "invalid" (get $config .))) -}}
{{- $_ := set $given . (list (get $config .)) -}}
{{- end -}}
{{- end -}}
{{- range $name, $ids := $given -}}
{{- range $ids -}}
{{- if or (lt (int64 .) 0) (and $size (ge (int64 .) (int64 $size))) -}}
{{- $_ := set $problems (printf "%s.config.%s is %d; allowed: at least 0 and below simulated_vocab_size, which is %d" $where $name (int64 .) $size) true -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
