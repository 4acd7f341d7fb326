{{/* The configuration and the workers: as given, or those of the demo. */}}
{{- define "pagemill.given" -}}
{{- if .Values.workers }}
{{- $models := dict }}
{{- range .Values.workers }}{{ with .model }}{{ $_ := set $models . true }}{{ end }}{{ end }}
{{- $source := or .Values.models.claim .Values.models.size .Values.models.volume }}
{{- range $model, $settings := (fromYaml .Values.config).models }}
{{- if and (hasPrefix "/models" $settings.path) (not $source) }}
{{- fail (printf "models: %q of config is in /models: name a claim, a size or a volume" $model) }}
{{- end }}
{{- if not (hasKey $models $model) }}
{{- fail (printf "workers: none serves model %q of config: write both again with `pagemill manifests --for-helm`" $model) }}
{{- end }}
{{- end }}
{{- pick .Values "config" "drainSeconds" "workers" | toYaml }}
{{- else if .Values.config }}
{{- fail "workers: missing for config: write both with `pagemill manifests --for-helm`" }}
{{- else }}
{{- .Files.Get "files/demo.yaml" }}
{{- end }}
{{- end }}

{{/* All workers by name, with the defaults, the autoscaler and the server of metrics. */}}
{{- define "pagemill.workers" -}}
{{- $own := dict "metrics" (dict "role" "metrics" "min" 1 "max" 1) }}
{{- if eq .Values.scaling "pagemill" }}
{{- $n := .Values.autoscaler.replicas }}
{{- $_ := set $own "autoscaler" (dict "role" "autoscaler" "min" $n "max" $n "serviceAccountName" "pagemill-autoscaler") }}
{{- end }}
{{- $all := dict }}
{{- range $name, $worker := merge $own (include "pagemill.given" . | fromYaml).workers }}
{{- $_ := set $all $name (mergeOverwrite (deepCopy $.Values.worker) $worker) }}
{{- end }}
{{- toYaml $all }}
{{- end }}

{{/* Not empty for a worker whose number is changed by KEDA or the autoscaler. */}}
{{- define "pagemill.isScaled" -}}
{{- if and .worker.scaled (eq .scaling "pagemill") }}yes
{{- else if and .worker.scaled (eq .scaling "keda") (gt (int .worker.max) (int .worker.min)) }}yes
{{- end }}
{{- end }}

{{- define "pagemill.labels" -}}
app.kubernetes.io/name: pagemill
app.kubernetes.io/component: {{ .role }}
app.kubernetes.io/instance: {{ .name }}
{{- end }}

{{- define "pagemill.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "pagemill.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "pagemill.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "pagemill.natsUrl" -}}
{{- if .Values.nats.enabled }}nats://nats.{{ .Release.Namespace }}:4222
{{- else }}{{ required "nats.url: the URL of your NATS servers, because nats.enabled is false" .Values.nats.url }}
{{- end }}
{{- end }}

