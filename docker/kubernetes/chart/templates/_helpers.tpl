{{- define "gateway.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "gateway.labels" -}}
{{ include "gateway.selector" . }}
app.kubernetes.io/part-of: hetero-gateway
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
{{- define "gateway.image" -}}
{{ printf "%s:%s" .Values.image.repository .Values.image.tag }}
{{- end }}
{{- define "gateway.secret" -}}
{{ .Values.keys.existingSecret | default (printf "%s-keys" .Release.Name) }}
{{- end }}
{{- define "gateway.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}
{{- define "gateway.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
{{- /* A secret of the release that is there already, else a random one: what an upgrade must not change. */ -}}
{{- define "gateway.kept" -}}
{{- $known := (lookup "v1" "Secret" .root.Release.Namespace (include "gateway.secret" .root)).data | default dict -}}
{{- if .value -}}
{{- .value | b64enc -}}
{{- else -}}
{{- index $known .key | default (randAlphaNum 40 | b64enc) -}}
{{- end -}}
{{- end }}
{{- /* gateway.yaml: what values.gateway says, and what the chart knows better. */ -}}
{{- define "gateway.configuration" -}}
{{- $config := deepCopy .Values.gateway -}}
{{- $server := merge (dict "host" "0.0.0.0" "port" 8000 "admin_key_env" "HETERO_GATEWAY_ADMIN_KEY") ($config.server | default dict) -}}
{{- if eq .Values.access "key" -}}
{{- $_ := set $server "api_key_env" "HETERO_GATEWAY_API_KEY" -}}
{{- else if eq .Values.access "names" -}}
{{- $clients := merge (dict "keys_file" "/etc/hetero-gateway-keys/keys.yaml") ($config.clients | default dict) -}}
{{- /* Nothing can be written beside a mounted Secret. */ -}}
{{- if not (or $clients.usage_file (dig "scheduler" "shared" "" $config)) -}}
{{- $_ := set $clients "usage_file" "off" -}}
{{- end -}}
{{- $_ := set $config "clients" $clients -}}
{{- if not (hasKey $server "watch_files_s") -}}
{{- $_ := set $server "watch_files_s" 10 -}}
{{- end -}}
{{- end -}}
{{- $_ := set $config "server" $server -}}
{{- if .Values.picker.enabled -}}
{{- $picker := dict "host" "0.0.0.0" "port" 9002 "health_port" 9003 -}}
{{- $_ := set $config "picker" (merge $picker ($config.picker | default dict) (dict "drain_s" 5)) -}}
{{- end -}}
{{- if .Values.discovery.selector -}}
{{- $source := dict "name" "pods" "kind" "kubernetes" "selector" .Values.discovery.selector "port" .Values.discovery.port -}}
{{- if .Values.discovery.profiles -}}
{{- $_ := set $source "profiles" .Values.discovery.profiles -}}
{{- end -}}
{{- $_ := set $config "discovery" (append ($config.discovery | default list) $source) -}}
{{- end -}}
{{- $instances := $config.instances | default list -}}
{{- range .Values.emulated -}}
{{- $set := printf "%s-%s" $.Release.Name .name -}}
{{- $profile := .profile -}}
{{- range until (int (.replicas | default 1)) -}}
{{- $pod := printf "%s-%d" $set . -}}
{{- $instances = append $instances (dict "id" $pod "base_url" (printf "http://%s.%s:8000" $pod $set) "profile" $profile) -}}
{{- end -}}
{{- end -}}
{{- $_ := set $config "instances" $instances -}}
{{- toYaml $config -}}
{{- end }}
{{- /* Longer than all that a pod does before it ends by itself. */ -}}
{{- define "gateway.graceSeconds" -}}
{{- $config := include "gateway.configuration" . | fromYaml -}}
{{- $drain := $config.server.drain_s | default 0 -}}
{{- if .Values.picker.enabled -}}
{{- $drain = $config.picker.drain_s -}}
{{- end -}}
{{- $shutdown := 30 -}}
{{- if hasKey $config.server "shutdown_timeout_s" -}}
{{- $shutdown = $config.server.shutdown_timeout_s -}}
{{- end -}}
{{- addf .Values.preStopSeconds $drain $shutdown 10 | ceil | int -}}
{{- end }}
{{- /* Of one StatefulSet: PromQL for its number of replicas, and the metric that prometheus-adapter makes of it. */ -}}
{{- define "gateway.desired" -}}
sum(hetero_gateway_desired_instances{model={{ .model | quote }},accelerator={{ .accelerator | quote }},tensor_parallel="{{ .tensorParallel | default 1 }}"})
{{- end }}
{{- define "gateway.desiredMetric" -}}
hetero_gateway_desired_instances_{{ .name | replace "-" "_" }}
{{- end }}
