{{- define "picker.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "picker.labels" -}}
{{ include "picker.selector" . }}
app.kubernetes.io/part-of: hetero-gateway
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}
