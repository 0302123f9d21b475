{{- define "paceline.name" -}}
{{- if .Values.nameOverride }}{{ .Values.nameOverride }}{{ else if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 53 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 53 | trimSuffix "-" }}{{ end }}
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

{{- /* of objects in the release's namespace */}}
{{- define "paceline.metadata" -}}
name: {{ include "paceline.name" . }}
namespace: {{ .Release.Namespace }}
labels: {{- include "paceline.labels" . | nindent 2 }}
{{- end }}

{{- define "paceline.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "paceline.name" .) }}
{{- end }}

{{- define "paceline.keySecret" -}}
{{ .Values.operatorKey.existingSecret | default (printf "%s-key" (include "paceline.name" .)) }}
{{- end }}

{{- define "paceline.image" -}}
{{- $where := .Values.image.repository }}
{{- if not $where }}
{{- $where = printf "%s/paceline-operator" (required "set imageRegistry to where you pushed the images, or image.repository to the operator's" .Values.imageRegistry | trimSuffix "/") }}
{{- end }}
{{- if .Values.image.digest }}{{ $where }}@{{ .Values.image.digest }}{{ else }}{{ $where }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "paceline.runtimeImage" -}}
{{- if .Values.runtime.image }}{{ .Values.runtime.image }}
{{- else }}{{ printf "%s/paceline-runtime:%s" (required "set imageRegistry to where you pushed the images, or runtime.image to that of the pods' runtime" .Values.imageRegistry | trimSuffix "/") (.Values.image.tag | default .Chart.AppVersion) }}
{{- end }}
{{- end }}

{{- define "paceline.policyApi" -}}
{{ if semverCompare ">=1.21.0-0" .Capabilities.KubeVersion.Version }}policy/v1{{ else }}policy/v1beta1{{ end }}
{{- end }}

{{- /* cluster-scoped, so the namespace is a part of it */}}
{{- define "paceline.webhookConfiguration" -}}
{{ printf "%s.%s" (include "paceline.name" .) .Release.Namespace }}
{{- end }}
