{{- define "paceline.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 53 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 53 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "paceline.selector" -}}
app.kubernetes.io/name: paceline-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "paceline.labels" -}}
{{ include "paceline.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: paceline
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "paceline.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "paceline.name" .) }}
{{- end }}

{{- define "paceline.keySecret" -}}
{{ .Values.operatorKey.existingSecret | default (printf "%s-key" (include "paceline.name" .)) }}
{{- end }}
