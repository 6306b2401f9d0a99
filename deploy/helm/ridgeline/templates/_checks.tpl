{{- /* What the schema cannot say: refused before anything is sent. */ -}}
{{- define "ridgeline.checks" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,51}[a-z0-9])?$" .Release.Name) -}}
{{- fail (printf "release name %q: take 1 to 53 lower-case letters, digits and hyphens, the first a letter and the last no hyphen, since Services are named so" .Release.Name) -}}
{{- end -}}
{{- $offered := dict -}}
{{- range $name, $group := .Values.groups -}}
{{- $_ := set $offered (print "ridgeline_" $name) (max 1 $group.gpus) -}}
{{- if gt (int $group.minAvailable) (int $group.maxPods) -}}
{{- fail (printf "groups.%s.minAvailable is above maxPods, %d: lower it or raise maxPods, else no node is ever drained" $name (int $group.maxPods)) -}}
{{- end -}}
{{- end -}}
{{- range $pool, $settings := .Values.config.pools -}}
{{- range $resource, $number := dig "resources" dict ($settings | default dict) -}}
{{- if and (hasPrefix "ridgeline_" $resource) (gt (float64 $number) (float64 (get $offered $resource))) -}}
{{- fail (printf "config.pools.%s.resources: no pod has %v of %s, groups offer %s: correct it, or add or enlarge a group" $pool $number $resource (toJson $offered)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
