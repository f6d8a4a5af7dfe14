#!/bin/sh
# Makes a release in a registry with a password, and installs it on two fresh clusters, by Helm and by manifests. See README.md.
# CLUSTER and IMAGES are the programs of these names.
set -eu
cd "$(dirname "$0")/../.."
title=release-test
. e2e/lib.sh
files=$PWD/build/release
version=0.0.0-test
user=release
password=correct-horse
namespace=tenant
server=

clean_more() { [ -z "$server" ] || kill "$server" 2>/dev/null || true; }

# Starts the registry, whose address exists while the cluster is up.
start_registry() {
    cat >"$work/registry.yaml" <<END
version: 0.1
log: {level: warn, accesslog: {disabled: true}}
storage: {filesystem: {rootdirectory: $work/registry}}
http: {addr: "$CLUSTER_REGISTRY"}
auth: {htpasswd: {realm: release-test, path: $PWD/e2e/release/registry.htpasswd}}
END
    # It takes variables that begin with REGISTRY_ for its own settings.
    env -u REGISTRY_AUTH_FILE OTEL_TRACES_EXPORTER=none "$registry" serve "$work/registry.yaml" >"$work/registry.log" 2>&1 &
    server=$!
    for _ in $(seq 50); do
        # Any answer will do: without credentials it is a refusal.
        ! python3 -c "import socket; socket.create_connection(('${CLUSTER_REGISTRY%:*}', ${CLUSTER_REGISTRY#*:}), 1)" 2>/dev/null || return 0
        sleep 0.2
    done
    cat "$work/registry.log" >&2
    return 1
}

# Brings up a cluster that has only the test's guest.
fresh_cluster() {
    created=yes
    "$CLUSTER" up
    eval "$("$CLUSTER" env)"
    "$CLUSTER" load-image build/images/guest-tiny.tar
    start_registry
}

drop_cluster() {
    kill "$server"
    server=
    "$CLUSTER" down
    created=no
}

wait_deployed() {
    kubectl --namespace kubevirt rollout status --timeout=240s daemonset/virt-handler deployment/virt-controller deployment/virt-api
    kubectl --namespace kubevirt wait kubevirt/kubevirt --for=jsonpath='{.status.phase}'=Deployed --timeout=120s
}

create_vm() {
    kubectl create namespace $namespace
    kubectl label namespace $namespace pod-security.kubernetes.io/enforce=restricted
    kubectl apply --namespace $namespace --filename examples/vm-tiny.yaml
}

# Waits until the guest shows its prompt, and checks the image and the absence of credentials.
wait_booted() {
    kubectl wait --namespace $namespace vm/tiny --for=jsonpath='{.status.printableStatus}'=Running --timeout=180s || fail 'the VM does not run'
    pod=$(kubectl get pods --namespace $namespace --output name)
    shown=
    for _ in $(seq 20); do
        # Enter repeats a prompt from before.
        shown=$({ sleep 2; printf '\n'; sleep 3; } | timeout 10 "$(dirname "$CLUSTER")/kubectl-virt" console tiny --namespace $namespace 2>&1 || true)
        case $shown in *login:*) break ;; esac
    done
    case $shown in *login:*) ;; *) fail "the guest shows no prompt, but: $shown" ;; esac
    image=$(kubectl get --namespace $namespace "$pod" --output jsonpath='{.spec.containers[?(@.name=="compute")].image}')
    digest=$(sed -n "s/^| .*\/virt-launcher:$version. | .\(sha256:[0-9a-f]*\). |$/\1/p" "$files/RELEASE_NOTES.md")
    [ "$image" = "$CLUSTER_REGISTRY/ferrovirt/virt-launcher:$version@$digest" ] || fail "the launcher runs $image, released was $digest"
    no_credentials
}

no_credentials() {
    [ -z "$(kubectl get secrets --namespace $namespace --output name)" ] || fail 'the namespace of the VM has a secret'
    [ -z "$(kubectl get pods --namespace $namespace --output jsonpath='{.items[*].spec.imagePullSecrets}')" ] || fail 'the launcher pod has pull secrets'
}

need_former
need_no_cluster
registry=$("$CLUSTER" build-registry)

step 'cluster of Helm'
fresh_cluster
printf '{"auths": {"%s": {"auth": "%s"}}}\n' "$CLUSTER_REGISTRY" "$(printf '%s:%s' $user $password | base64)" >"$work/auth.json"
REGISTRY_AUTH_FILE=$work/auth.json
HELM_REGISTRY_CONFIG=$work/auth.json
export HELM_REGISTRY_CONFIG REGISTRY_AUTH_FILE

step 'make the release'
mkdir -p "$work/former"
git archive $former_commit charts/ferrovirt | tar -x -C "$work/former"
former_chart=$(helm package "$work/former/charts/ferrovirt" --destination "$work/former" | sed 's/.*: //')
openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$work/key.pem" 2>/dev/null
openssl pkey -in "$work/key.pem" -pubout -out "$work/key.pub"
"$IMAGES" release --registry "$CLUSTER_REGISTRY/ferrovirt" --version $version --helm "$(command -v helm)" --former "$former_chart" --insecure \
    --sign-key "$work/key.pem"
(cd "$files" && sha256sum --quiet --check SHA256SUMS)

step 'checksums and images are signed'
openssl dgst -sha256 -verify "$work/key.pub" -signature "$files/SHA256SUMS.sig" "$files/SHA256SUMS"
released=$(sed -n "s/^| .*\/virt-api:$version. | .\(sha256:[0-9a-f]*\). |$/\1/p" "$files/RELEASE_NOTES.md")
skopeo copy --quiet --src-tls-verify=false "docker://$CLUSTER_REGISTRY/ferrovirt/virt-api:$(echo "$released" | tr : -).sig" "dir:$work/signature"
python3 - "$work/signature" "$released" <<'END'
import base64, json, pathlib, sys
folder, released = pathlib.Path(sys.argv[1]), sys.argv[2]
layer = json.loads((folder / "manifest.json").read_text())["layers"][0]
statement = (folder / layer["digest"].removeprefix("sha256:")).read_bytes()
assert json.loads(statement)["critical"]["image"]["docker-manifest-digest"] == released, statement
(folder / "statement").write_bytes(statement)
(folder / "der").write_bytes(base64.b64decode(layer["annotations"]["dev.cosignproject.cosign/signature"]))
END
openssl dgst -sha256 -verify "$work/key.pub" -signature "$work/signature/der" "$work/signature/statement"

step 'a released version is not replaced'
skopeo copy --quiet --dest-tls-verify=false oci-archive:build/images/virt-api.tar "docker://$CLUSTER_REGISTRY/ferrovirt/virt-controller:9.9.9-test"
! "$IMAGES" release --registry "$CLUSTER_REGISTRY/ferrovirt" --version 9.9.9-test --files "$work/again" --helm "$(command -v helm)" --insecure \
    >"$work/refusal" 2>&1 || fail 'an image of another release is replaced'
grep -q 'virt-controller:9.9.9-test exists with another content' "$work/refusal" || fail "the refusal is: $(cat "$work/refusal")"

# Release 0.1.0 had no migrations.
sed -n '/^## Rights/,$p' "$files/RELEASE_NOTES.md" >"$work/rights"
grep -q 'virtualmachineinstancemigrations' "$work/rights" || fail "the rights do not differ as expected from those of $former: $(cat "$work/rights")"

step 'install by Helm with a pull secret'
kubectl create namespace kubevirt
kubectl label namespace kubevirt pod-security.kubernetes.io/enforce=privileged
kubectl create secret docker-registry registry --namespace kubevirt --docker-server="$CLUSTER_REGISTRY" --docker-username=$user --docker-password=$password
helm install ferrovirt "oci://$CLUSTER_REGISTRY/ferrovirt/charts/ferrovirt" --version $version --plain-http --namespace kubevirt --timeout 4m \
    --set 'imagePullSecrets[0].name=registry' --set kubevirt.configuration.developerConfiguration.useEmulation=true
wait_deployed

step 'helm upgrade --reuse-values keeps no digests of the former release'
helm package charts/ferrovirt --version 9.9.9 --app-version 9.9.9 --destination "$work" >/dev/null
images=$(helm upgrade ferrovirt "$work/ferrovirt-9.9.9.tgz" --namespace kubevirt --reuse-values --dry-run=server | sed -n 's|^ *image: .*/\(virt-[^/]*\)$|\1|p' | sort -u)
[ "$(echo $images)" = 'virt-api:9.9.9 virt-controller:9.9.9 virt-handler:9.9.9 virt-launcher:9.9.9' ] || fail "an upgrade would take images $images"

step 'kubelet lets no pod use an image that another one pulled with a secret'
create_vm
for _ in $(seq 60); do
    state=$(kubectl get vm tiny --namespace $namespace --output jsonpath='{.status.printableStatus}')
    case $state in ErrImagePull | ImagePullBackOff) break ;; esac
    sleep 1
done
case $state in ErrImagePull | ImagePullBackOff) ;; *) fail "the VM is $state, not ErrImagePull" ;; esac
no_credentials

step 'the launcher image is on the list of kubelet (docs/guides/install.md)'
number=${FERROVIRT_INSTANCE:-0}
kubelet=build/cluster/node-1/kubelet.yaml
[ "$number" = 0 ] || kubelet=build/cluster-$number/node-1/kubelet.yaml
python3 - $kubelet "$CLUSTER_REGISTRY/ferrovirt/virt-launcher" <<'END'
import json, sys
path, launcher = sys.argv[1:]
with open(path) as file:
    configuration = json.load(file)
configuration["imagePullCredentialsVerificationPolicy"] = "NeverVerifyAllowlistedImages"
# That of the test's guest was imported.
configuration["preloadedImagesVerificationAllowlist"] = [launcher, "ferrovirt.io/*"]
with open(path, "w") as file:
    json.dump(configuration, file)
END
"$CLUSTER" exec node-1 -- pkill -x kubelet
# A new pod starts without the delay after failed pulls.
kubectl delete pods --namespace $namespace --all --wait=false
wait_booted
step 'the VM of Helm runs'
helm test ferrovirt --namespace kubevirt --timeout 4m
kubectl delete namespace $namespace --timeout=120s
helm uninstall ferrovirt --namespace kubevirt --timeout 4m
drop_cluster

step 'cluster of manifests; kubelet has credentials for all pods'
fresh_cluster
"$CLUSTER" exec node-1 -- sh -c 'umask 077; cat >/var/lib/kubelet/config.json' <"$work/auth.json"
kubectl apply --server-side --filename "$files/crds.yaml" --filename "$files/importer-crds.yaml" >/dev/null
kubectl wait --for=condition=Established --timeout=60s crd --all >/dev/null
kubectl apply --server-side --filename "$files/install.yaml" >/dev/null
# The webhook that reviews this is a part of the installation.
within 180 'virt-api reviews the configuration' kubectl patch kubevirt kubevirt --namespace kubevirt --type merge \
    --patch '{"spec": {"configuration": {"developerConfiguration": {"useEmulation": true}}}}'
wait_deployed
create_vm
wait_booted
# A second apply of the same files conflicts with no field of the components.
kubectl apply --server-side --filename "$files/install.yaml" >/dev/null || fail 'the manifests cannot be applied again'
kubectl delete namespace $namespace --timeout=120s
drop_cluster
step 'done'
