#!/bin/sh
# Takes Holdfast's finalizers off TrainingJobs and pods, for a cluster that Holdfast has left for good.
#
# While a controller runs it takes them off itself, in time: a job's when nothing of it runs any more, a pod's
# when what it said at its end has been written down. After `helm uninstall` nobody does, and whoever deletes
# a job, a pod or a namespace waits for ever. Nothing is deleted here; what was deleted already goes.
set -eu

running=$(kubectl get deployments --all-namespaces \
    --selector=app.kubernetes.io/name=holdfast,app.kubernetes.io/component=controller --output=name)
if [ -n "$running" ]; then
    echo "let-go: $running is installed and takes finalizers off itself; helm uninstall comes first" >&2
    exit 1
fi

# let_go KIND FINALIZER [SELECTOR]: off every object that has it, and no other finalizer with it.
let_go() {
    kubectl get "$1" --all-namespaces ${3:+"--selector=$3"} --output=go-template='{{range .items}}{{$meta := .metadata}}
{{- range $index, $name := .metadata.finalizers}}{{if eq $name "'"$2"'"}}
{{- $meta.namespace}} {{$meta.name}} {{$index}}{{"\n"}}{{end}}{{end}}{{end}}' |
    while read -r namespace name index; do
        at="/metadata/finalizers/$index"
        kubectl patch "$1" "$name" --namespace="$namespace" --type=json --patch="[
            {\"op\": \"test\", \"path\": \"$at\", \"value\": \"$2\"},
            {\"op\": \"remove\", \"path\": \"$at\"}]"
    done
}

let_go pods holdfast.dev/evidence app.kubernetes.io/managed-by=holdfast
if kubectl get crd trainingjobs.holdfast.dev --output=name >/dev/null 2>&1; then
    let_go trainingjobs.holdfast.dev holdfast.dev/attempts
fi
