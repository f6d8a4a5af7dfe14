{{/* The reference of one image: ferrovirt.image (list $ "virt-api") */}}
{{- define "ferrovirt.image" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- with index ($root.Values.image.overrides | default dict) $name -}}
{{ . }}
{{- else -}}
{{ include "ferrovirt.ownImage" (list $root $name "") }}
{{- end -}}
{{- end -}}

{{/* The reference of an image in image.registry: ferrovirt.ownImage (list $ "virt-launcher" "-debug"), the last for the tag */}}
{{- define "ferrovirt.ownImage" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $suffix := index . 2 -}}
{{- $tag := $root.Values.image.tag | default ($root.Chart.AppVersion | replace "+" "_") -}}
{{- $image := print $name ":" $tag $suffix -}}
{{ $root.Values.image.registry }}/{{ $image }}
{{- /* The keys contain the tag: `helm upgrade --reuse-values` keeps the digests of the former release. */}}
{{- with index ($root.Values.image.digests | default dict) $image -}}
@{{ . }}
{{- end -}}
{{- end -}}

{{/* The image of launcher pods. */}}
{{- define "ferrovirt.launcherImage" -}}
{{- $override := index (.Values.image.overrides | default dict) "virt-launcher" -}}
{{- if not .Values.launcherPods.debug -}}
{{ include "ferrovirt.image" (list . "virt-launcher") }}
{{- else if not $override -}}
{{ include "ferrovirt.ownImage" (list . "virt-launcher" "-debug") }}
{{- else if or (contains "@" $override) (not (regexMatch ":[^/:@]+$" $override)) -}}
{{- fail (printf "launcherPods.debug adds -debug to the tag of image virt-launcher, and %s ends with none: name the debug image in image.overrides instead" $override) -}}
{{- else -}}
{{ $override }}-debug
{{- end -}}
{{- end -}}

{{/* The image of launcher pods of guests of arm64. */}}
{{- define "ferrovirt.launcherImageArm64" -}}
{{- with index (.Values.image.overrides | default dict) "virt-launcher-arm64" -}}
{{ . }}
{{- else -}}
{{ include "ferrovirt.ownImage" (list . "virt-launcher" "-arm64") }}
{{- end -}}
{{- end -}}

{{/* The use of the importer. In YAML, on and off without quotes are true and false. An upgrade can lack the value. */}}
{{- define "ferrovirt.importer" -}}
{{- $value := toString (ternary "auto" .Values.importer (kindIs "invalid" .Values.importer)) -}}
{{ get (dict "true" "on" "false" "off") $value | default $value }}
{{- end -}}

{{/* Labels of objects that belong to no component. */}}
{{- define "ferrovirt.labels" -}}
{{ include "ferrovirt.componentLabels" (list . "kubevirt") }}
{{- end -}}

{{/* Labels of an object of a component: ferrovirt.componentLabels (list $ "virt-api") */}}
{{- define "ferrovirt.componentLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: ferrovirt
app.kubernetes.io/part-of: ferrovirt
app.kubernetes.io/component: {{ index . 1 }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | replace "+" "_" | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels and annotations of the pods of a component: ferrovirt.podMetadata (list $ "virt-api" $values) */}}
{{- define "ferrovirt.podMetadata" -}}
{{- $values := index . 2 -}}
{{- $labels := dict "kubevirt.io" (index . 1) "prometheus.kubevirt.io" "true" -}}
{{- $labels = merge (deepCopy ($values.podLabels | default dict)) $labels (include "ferrovirt.componentLabels" . | fromYaml) -}}
labels:
  {{- toYaml $labels | nindent 2 }}
{{- with $values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "ferrovirt.pullSecrets" -}}
{{- $secrets := concat ((.Values.global | default dict).imagePullSecrets | default list) (.Values.imagePullSecrets | default list) }}
{{- range .Values.image.pullSecrets }}
{{- $secrets = append $secrets (dict "name" .) }}
{{- end }}
{{- with uniq $secrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Not empty if the definitions stay after the installation. */}}
{{- define "ferrovirt.keepsDefinitions" -}}
{{- if dig "keep" true (.Values.crds | default dict) }}true{{ end }}
{{- end -}}

{{/* The names of the definitions, as JSON. */}}
{{- define "ferrovirt.definitions" -}}
{{- $names := list }}
{{- range $path, $_ := .Files.Glob "crds/*.yaml" }}
{{- $names = append $names ($.Files.Get $path | fromYaml).metadata.name }}
{{- end }}
{{- toJson $names }}
{{- end -}}

{{/* The names of the definitions of the importer, which CDI has as well, as JSON. */}}
{{- define "ferrovirt.importerDefinitions" -}}
["datasources.cdi.kubevirt.io", "datavolumes.cdi.kubevirt.io"]
{{- end -}}

{{/* Security of an unprivileged pod: passes the pod security standard "restricted". */}}
{{- define "ferrovirt.restrictedPod" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "ferrovirt.restrictedContainer" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{/* The install namespace, for a process. */}}
{{- define "ferrovirt.namespaceEnv" -}}
- name: POD_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
{{- end -}}

{{/* The addresses of the node, for a process: kubelet's probes come from one of them where pods have no bridge. */}}
{{- define "ferrovirt.hostIPsEnv" -}}
- name: HOST_IPS
  valueFrom:
    fieldRef:
      fieldPath: status.hostIPs
{{- end -}}

{{/* The collector of traces, for a process; nothing while traces are off. */}}
{{- define "ferrovirt.tracingEnv" -}}
{{- with .Values.tracing }}
{{- if .endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ .endpoint | quote }}
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ .samplingRatio | default 0 | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Environment variables of the administrator, for a process. */}}
{{- define "ferrovirt.extraEnv" -}}
{{- with .extraEnv }}
{{- toYaml . }}
{{- end }}
{{- end -}}

{{/*
Probes of all three processes. All paths answer from memory, so they can be asked often; a readiness that is seen two
seconds after it came true is two seconds of every installation.
*/}}
{{- define "ferrovirt.probes" -}}
readinessProbe:
  httpGet:
    scheme: HTTPS
    port: metrics
    path: /readyz
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 3
# Two minutes for the start, such as under software emulation on a node that is busy.
startupProbe:
  httpGet:
    scheme: HTTPS
    port: metrics
    path: /livez
  periodSeconds: 1
  timeoutSeconds: 2
  failureThreshold: 120
  terminationGracePeriodSeconds: 30
livenessProbe:
  httpGet:
    scheme: HTTPS
    port: metrics
    path: /livez
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 3
  # The grace period of virt-handler's pods is for migrations: a process that hangs does not end any.
  terminationGracePeriodSeconds: 30
{{- end -}}

{{/* Affinity and spread of a Deployment: ferrovirt.spread (list $values "virt-api"). Replicas are on different nodes, if there are several. */}}
{{- define "ferrovirt.spread" -}}
{{- $values := index . 0 -}}
affinity:
  {{- with $values.affinity }}
  {{- toYaml . | nindent 2 }}
  {{- else }}
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              kubevirt.io: {{ index . 1 }}
  {{- end }}
{{- with $values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Name of the ServiceMonitor and of the PrometheusRule, as with KubeVirt. */}}
{{- define "ferrovirt.monitoringName" -}}
prometheus-kubevirt-rules
{{- end -}}

{{/* Labels of objects for monitoring: ferrovirt.monitoringLabels (list $ $labels). Those of the values replace others. */}}
{{- define "ferrovirt.monitoringLabels" -}}
{{- $labels := dict "k8s-app" "kubevirt" "prometheus.kubevirt.io" "true" -}}
{{- $labels = merge (deepCopy (index . 1 | default dict)) $labels (include "ferrovirt.labels" (index . 0) | fromYaml) -}}
{{ toYaml $labels }}
{{- end -}}

{{/* A webhook's connection to virt-api. virt-controller sets caBundle and path. */}}
{{- define "ferrovirt.webhookClient" -}}
admissionReviewVersions: [v1]
timeoutSeconds: 5
clientConfig:
  service:
    namespace: {{ .Release.Namespace }}
    name: virt-api
{{- end -}}

{{/* Secrets and ConfigMaps that virt-controller creates in the install namespace, as JSON. */}}
{{- define "ferrovirt.secrets" -}}
["kubevirt-ca", "kubevirt-virt-api-certs", "kubevirt-api-client-certs", "kubevirt-controller-certs", "kubevirt-webhook-path"]
{{- end -}}

{{- define "ferrovirt.configMaps" -}}
["kubevirt-ca"]
{{- end -}}

{{/* Number of parts into which the VMs are divided among the replicas of virt-controller. */}}
{{- define "ferrovirt.shards" -}}
{{- .Values.virtController.shards | default 1 | int -}}
{{- end -}}

{{/* Leases of virt-controller for this number of shards, as JSON. */}}
{{- define "ferrovirt.leases" -}}
{{- $names := list "virt-controller" -}}
{{- range $shard := untilStep 1 (int .) 1 -}}
{{- $names = append $names (printf "virt-controller-%d" $shard) -}}
{{- end -}}
{{- toJson $names -}}
{{- end -}}

{{/* An image without tag and digest. */}}
{{- define "ferrovirt.repository" -}}
{{ regexReplaceAll "(:[^/:@]+)?(@.*)?$" . "" }}
{{- end -}}

{{/* CEL: the image of a container is of one of these repositories: ferrovirt.imageIsOneOf (list "c" $repositories) */}}
{{- define "ferrovirt.imageIsOneOf" -}}
{{- $container := index . 0 -}}
({{ range $index, $repository := index . 1 }}{{ if $index }} || {{ end -}}
{{ $container }}.image == {{ $repository | quote }} || {{ $container }}.image.startsWith({{ printf "%s:" $repository | quote }}) || {{ $container }}.image.startsWith({{ printf "%s@" $repository | quote }})
{{- else }}false{{ end }})
{{- end -}}

{{/* CEL: the controller of an object is of one of these kinds: ferrovirt.controlledBy (list "oldObject" "VirtualMachine") */}}
{{- define "ferrovirt.controlledBy" -}}
{{- $object := index . 0 -}}
has({{ $object }}.metadata.ownerReferences) && {{ $object }}.metadata.ownerReferences.exists(o, has(o.controller) && o.controller && o.apiVersion.startsWith("kubevirt.io/") && o.kind in {{ rest . | toJson }})
{{- end -}}

{{/* CEL: a VMI is among the owners of an object: ferrovirt.ownedByVmi "object" */}}
{{- define "ferrovirt.ownedByVmi" -}}
has({{ . }}.metadata.ownerReferences) && {{ . }}.metadata.ownerReferences.exists(o, o.kind == "VirtualMachineInstance" && o.apiVersion.startsWith("kubevirt.io/"))
{{- end -}}

{{/* CEL: the VMIs in a list of owner references, as texts: ferrovirt.vmisAmong "variables.newOwnerReferences" */}}
{{- define "ferrovirt.vmisAmong" -}}
{{ . }}.filter(o, o.kind == "VirtualMachineInstance" && o.apiVersion.startsWith("kubevirt.io/")).map(o, string(o.apiVersion) + "," + string(o.name) + "," + string(o.uid) + (has(o.controller) && o.controller ? ",controller" : ""))
{{- end -}}

{{/* CEL: a container of a pod requests /dev/userfaultfd */}}
{{- define "ferrovirt.requestsUserfaultfd" -}}
(object.spec.containers + (has(object.spec.initContainers) ? object.spec.initContainers : [])).exists(c, has(c.resources) && ((has(c.resources.limits) && "devices.kubevirt.io/userfaultfd" in c.resources.limits) || (has(c.resources.requests) && "devices.kubevirt.io/userfaultfd" in c.resources.requests)))
{{- end -}}

{{/* CEL: a pool controls an object: ferrovirt.ofPool "oldObject" */}}
{{- define "ferrovirt.ofPool" -}}
has({{ . }}.metadata.ownerReferences) && {{ . }}.metadata.ownerReferences.exists(o, has(o.controller) && o.controller && o.apiVersion.startsWith("pool.kubevirt.io/") && o.kind == "VirtualMachinePool" && o.uid != "")
{{- end -}}

{{/* CEL: a DataVolume controls an object: ferrovirt.ofDataVolume "oldObject" */}}
{{- define "ferrovirt.ofDataVolume" -}}
has({{ . }}.metadata.ownerReferences) && {{ . }}.metadata.ownerReferences.exists(o, has(o.controller) && o.controller && o.apiVersion.startsWith("cdi.kubevirt.io/") && o.kind == "DataVolume" && o.uid != "")
{{- end -}}

{{/* CEL: a claim is the temporary one of a clone: ferrovirt.isTemporaryClaim "oldObject" */}}
{{- define "ferrovirt.isTemporaryClaim" -}}
has({{ . }}.metadata.labels) && "cdi.kubevirt.io/OwnedByUID" in {{ . }}.metadata.labels && {{ . }}.metadata.name == "tmp-pvc-" + {{ . }}.metadata.labels["cdi.kubevirt.io/OwnedByUID"] && !has({{ . }}.metadata.ownerReferences)
{{- end -}}

{{/* CEL: a claim is for the state of a VM or VMI, and goes with it: ferrovirt.isStateClaim "oldObject" */}}
{{- define "ferrovirt.isStateClaim" -}}
({{ . }}.metadata.name.startsWith("persistent-state-for-") || (has({{ . }}.metadata.labels) && "persistent-state-for" in {{ . }}.metadata.labels)) && has({{ . }}.metadata.ownerReferences) && {{ . }}.metadata.ownerReferences.size() == 1 && {{ . }}.metadata.ownerReferences.all(o, has(o.controller) && o.controller && o.uid != "" && o.apiVersion.startsWith("kubevirt.io/") && o.kind in ["VirtualMachine", "VirtualMachineInstance"])
{{- end -}}

{{/* CEL: a claim is for the memory of a hibernated VM, and goes with it: ferrovirt.isHibernationClaim "oldObject" */}}
{{- define "ferrovirt.isHibernationClaim" -}}
{{ . }}.metadata.name.startsWith("hibernation-of-") && has({{ . }}.metadata.labels) && "ferrovirt.io/hibernation-of" in {{ . }}.metadata.labels && {{ include "ferrovirt.controlledBy" (list . "VirtualMachine") }} && {{ . }}.metadata.ownerReferences.size() == 1
{{- end -}}

{{/* CEL: a snapshot of a VM, or its content, controls an object: ferrovirt.ofSnapshot (list "object" "VirtualMachineSnapshot") */}}
{{- define "ferrovirt.ofSnapshot" -}}
has({{ index . 0 }}.metadata.ownerReferences) && {{ index . 0 }}.metadata.ownerReferences.exists(o, has(o.controller) && o.controller && o.apiVersion.startsWith("snapshot.kubevirt.io/") && o.kind == {{ index . 1 | quote }} && o.uid != "")
{{- end -}}

{{/* CEL: an object has an annotation: ferrovirt.isAnnotated (list "object" "key") */}}
{{- define "ferrovirt.isAnnotated" -}}
has({{ index . 0 }}.metadata.annotations) && {{ index . 1 | quote }} in {{ index . 0 }}.metadata.annotations
{{- end -}}

{{/* CEL: this write restores a VM */}}
{{- define "ferrovirt.restoresVm" -}}
{{- $key := "restore.kubevirt.io/lastRestoreUID" -}}
{{ include "ferrovirt.isAnnotated" (list "object" $key) }} && (!({{ include "ferrovirt.isAnnotated" (list "oldObject" $key) }}) || object.metadata.annotations["{{ $key }}"] != oldObject.metadata.annotations["{{ $key }}"])
{{- end -}}

{{/* CEL: a clone controls an object: ferrovirt.ofVmClone "oldObject" */}}
{{- define "ferrovirt.ofVmClone" -}}
has({{ . }}.metadata.ownerReferences) && {{ . }}.metadata.ownerReferences.exists(o, has(o.controller) && o.controller && o.apiVersion.startsWith("clone.kubevirt.io/") && o.kind == "VirtualMachineClone" && o.uid != "")
{{- end -}}

{{/* CEL: a pod fills a claim: ferrovirt.isImportPod "oldObject" */}}
{{- define "ferrovirt.isImportPod" -}}
has({{ . }}.metadata.labels) && "kubevirt.io" in {{ . }}.metadata.labels && {{ . }}.metadata.labels["kubevirt.io"] == "virt-importer" && {{ . }}.metadata.name.startsWith("importer-") && has({{ . }}.metadata.ownerReferences) && {{ . }}.metadata.ownerReferences.exists(o, has(o.controller) && o.controller && o.uid != "" && ((o.apiVersion.startsWith("cdi.kubevirt.io/") && o.kind == "DataVolume") || (o.apiVersion == "v1" && o.kind == "PersistentVolumeClaim" && o.name.startsWith("tmp-pvc-"))))
{{- end -}}

{{/* CEL: the KubeVirt object, as parameter of a policy, is deleted together with the workloads */}}
{{- define "ferrovirt.removesWorkloads" -}}
has(params.metadata.deletionTimestamp) && has(params.spec) && has(params.spec.uninstallStrategy) && params.spec.uninstallStrategy == "RemoveWorkloads"
{{- end -}}

{{/* CEL: the KubeVirt object enables a feature gate that is off by default: ferrovirt.hasFeatureGate "Name" */}}
{{- define "ferrovirt.hasFeatureGate" -}}
{{- $developer := "params.spec.configuration.developerConfiguration" -}}
has(params.spec) && has(params.spec.configuration) && has({{ $developer }}) && has({{ $developer }}.featureGates) && {{ . | quote }} in {{ $developer }}.featureGates && !(has({{ $developer }}.disabledFeatureGates) && {{ . | quote }} in {{ $developer }}.disabledFeatureGates)
{{- end -}}

{{/* CEL: key k is one of these, or begins as one of these: ferrovirt.keyIsOneOf (list $keys $prefixes) */}}
{{- define "ferrovirt.keyIsOneOf" -}}
(k in {{ index . 0 | default list | toJson }}{{ range index . 1 | default list }} || k.startsWith({{ . | quote }}){{ end }})
{{- end -}}

{{/* CEL: two maps differ only in keys that may change: ferrovirt.unchangedKeys (list "Labels" "condition on k") */}}
{{- define "ferrovirt.unchangedKeys" -}}
{{- $new := printf "variables.new%s" (index . 0) -}}
{{- $old := printf "variables.old%s" (index . 0) -}}
{{- $may := index . 1 -}}
{{ $new }}.all(k, {{ $may }} || (k in {{ $old }} && {{ $old }}[k] == {{ $new }}[k])) && {{ $old }}.all(k, {{ $may }} || k in {{ $new }})
{{- end -}}

{{/* CEL: the same of two lists. */}}
{{- define "ferrovirt.unchangedItems" -}}
{{- $new := printf "variables.new%s" (index . 0) -}}
{{- $old := printf "variables.old%s" (index . 0) -}}
{{- $may := index . 1 -}}
{{ $new }}.all(k, {{ $may }} || k in {{ $old }}) && {{ $old }}.all(k, {{ $may }} || k in {{ $new }})
{{- end -}}
