#!/bin/sh
# Version: Helm 4.2.4 (the Go module, which has fluxcd/cli-utils 1.2.1 for the states of objects).
# Expected: `helm install --wait` of a chart with a VM that is to stay stopped finishes, as in Helm 3, which waits for kinds of
# Kubernetes alone; and if Helm waits for a VM, it does so until the VM runs.
# Seen: Helm 4 waits for custom resources too, by a condition Ready. That of a stopped VM is False in KubeVirt, with the reason
# VMINotExists: the VM counts as InProgress until the time is over, and the release fails. A VM that has no condition yet counts
# as ready: for a VM that is just created the wait can end before its controller has seen it.
# Consequence: charts with stopped VMs are installed with --wait=legacy, or with hooks alone. With --rollback-on-failure the timeout
# removes VMs that are as they should be. Who needs a running VM uses kubectl wait afterwards.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export GOFLAGS=-mod=mod
go mod init finding 2>/dev/null
go get helm.sh/helm/v4@v4.2.4 2>/dev/null || exit 3
cat >main.go <<'GO'
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"time"

	"helm.sh/helm/v4/pkg/kube"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/klog/v2"
)

const timeout = 15 * time.Second

// Serves the discovery of one kind and its one object, whose status changes after a second if there is a later one.
func serve(first, later string) *httptest.Server {
	object := func(status string) string {
		return `{"apiVersion":"kubevirt.io/v1","kind":"VirtualMachine","metadata":{"name":"vm","namespace":"default",
			"uid":"1","generation":1,"resourceVersion":"1"},"spec":{},"status":` + status + `}`
	}
	answers := map[string]string{
		"/api": `{"kind":"APIVersions","versions":[]}`,
		"/apis": `{"kind":"APIGroupList","apiVersion":"v1","groups":[{"name":"kubevirt.io","versions":[{"groupVersion":"kubevirt.io/v1",
			"version":"v1"}],"preferredVersion":{"groupVersion":"kubevirt.io/v1","version":"v1"}}]}`,
		"/apis/kubevirt.io/v1": `{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"kubevirt.io/v1","resources":[{"name":
			"virtualmachines","kind":"VirtualMachine","namespaced":true,"verbs":["get","list","watch"]}]}`,
	}
	// Streams of initial events are refused, as by API servers without them, so that lists follow.
	return httptest.NewServer(http.HandlerFunc(func(answer http.ResponseWriter, request *http.Request) {
		answer.Header().Set("Content-Type", "application/json")
		query := request.URL.Query()
		if text, ok := answers[request.URL.Path]; ok {
			io.WriteString(answer, text)
		} else if !strings.HasSuffix(request.URL.Path, "/virtualmachines") || query.Has("sendInitialEvents") {
			answer.WriteHeader(http.StatusUnprocessableEntity)
			io.WriteString(answer, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Invalid","code":422}`)
		} else if query.Get("watch") == "" {
			fmt.Fprintf(answer, `{"kind":"VirtualMachineList","apiVersion":"kubevirt.io/v1","metadata":{"resourceVersion":"1"},
				"items":[%s]}`, object(first))
		} else {
			answer.(http.Flusher).Flush()
			if later != "" {
				time.Sleep(time.Second)
				fmt.Fprintf(answer, "{\"type\":\"MODIFIED\",\"object\":%s}\n", strings.ReplaceAll(object(later), "\n", " "))
				answer.(http.Flusher).Flush()
			}
			<-request.Context().Done()
		}
	}))
}

func wait(strategy kube.WaitStrategy, first, later string) (time.Duration, error) {
	server := serve(first, later)
	defer server.CloseClientConnections()
	flags := genericclioptions.NewConfigFlags(false)
	flags.APIServer = &server.URL
	waiter, err := kube.New(flags).GetWaiter(strategy)
	if err != nil {
		panic(err)
	}
	vm := &unstructured.Unstructured{}
	text := `{"apiVersion":"kubevirt.io/v1","kind":"VirtualMachine","metadata":{"name":"vm","namespace":"default"}}`
	if err := json.Unmarshal([]byte(text), vm); err != nil {
		panic(err)
	}
	mapping := &meta.RESTMapping{
		Resource:         schema.GroupVersionResource{Group: "kubevirt.io", Version: "v1", Resource: "virtualmachines"},
		GroupVersionKind: vm.GroupVersionKind(),
		Scope:            meta.RESTScopeNamespace,
	}
	start := time.Now()
	err = waiter.Wait(kube.ResourceList{{Name: "vm", Namespace: "default", Object: vm, Mapping: mapping}}, timeout)
	return time.Since(start).Round(time.Second), err
}

func main() {
	log.SetOutput(io.Discard)
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	slog.SetDefault(slog.New(slog.DiscardHandler))
	ready := func(status, reason string) string {
		return `{"created":false,"conditions":[{"type":"Ready","status":"` + status + `","reason":"` + reason + `"}]}`
	}
	stopped := ready("False", "VMINotExists")
	failed := false
	for _, check := range []struct {
		name         string
		strategy     kube.WaitStrategy
		first, later string
		waits        bool
	}{
		{"running", kube.StatusWatcherStrategy, ready("True", ""), "", false},
		{"stopped", kube.StatusWatcherStrategy, stopped, "", true},
		{"starting, without status", kube.StatusWatcherStrategy, "{}", stopped, false},
		{"stopped, Helm 3's strategy", kube.LegacyStrategy, stopped, "", false},
	} {
		taken, err := wait(check.strategy, check.first, check.later)
		fmt.Printf("%s: %q after %s\n", check.name, fmt.Sprint(err), taken)
		failed = failed || (err != nil) != check.waits || (taken >= timeout) != check.waits
	}
	if failed {
		os.Exit(1)
	}
}
GO
go mod tidy 2>/dev/null || exit 3
go build -o finding .
echo "Helm 4.2.4"
./finding
