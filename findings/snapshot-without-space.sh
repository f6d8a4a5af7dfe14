#!/bin/sh
# Version: external-snapshotter 8.7.0 (snapshot-controller and the sidecar csi-snapshotter), CSI 1.13.0.
# Expected: after RESOURCE_EXHAUSTED, the status of CreateSnapshot for "not enough space on the storage system", "Caller SHOULD fail
# this request" (CSI specification). A VolumeSnapshot that is deleted then goes away, as it does after INTERNAL.
# Seen: the sidecar counts RESOURCE_EXHAUSTED among the statuses after which a snapshot may still be in the making. VolumeSnapshot and
# content stay with their deletion timestamps, and CreateSnapshot is repeated for the deleted object until the driver answers
# something else. If space comes free, the snapshot is taken first and removed afterwards, at times only by the next resync.
# Consequence: with a full pool, a snapshot that failed cannot be deleted, nor can its namespace, just when users clean up. A driver
# that knows that nothing was begun avoids this with another status, for example INTERNAL. A program that waits for the end of a
# VolumeSnapshot needs a timeout, and a deletion timestamp is no proof that no snapshot will be taken.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export GOFLAGS=-mod=mod
go mod init finding 2>/dev/null
go get github.com/kubernetes-csi/external-snapshotter/v8@v8.7.0 github.com/kubernetes-csi/external-snapshotter/client/v8@v8.7.0 \
	github.com/container-storage-interface/spec@v1.13.0 k8s.io/client-go@v0.37.0 2>/dev/null || exit 3
cat >main.go <<'GO'
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	snapshots "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned/fake"
	snapshotscheme "github.com/kubernetes-csi/external-snapshotter/client/v8/clientset/versioned/scheme"
	snapshotinformers "github.com/kubernetes-csi/external-snapshotter/client/v8/informers/externalversions"
	common "github.com/kubernetes-csi/external-snapshotter/v8/pkg/common-controller"
	"github.com/kubernetes-csi/external-snapshotter/v8/pkg/metrics"
	sidecar "github.com/kubernetes-csi/external-snapshotter/v8/pkg/sidecar-controller"
	"github.com/kubernetes-csi/external-snapshotter/v8/pkg/snapshotter"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	kubefake "k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/testing"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
)

const name = "finding.example.com"

// driver answers CreateSnapshot with one status until another is set.
type driver struct {
	csi.UnimplementedControllerServer
	csi.UnimplementedIdentityServer
	answer           atomic.Uint32
	creates, deletes atomic.Int32
}

func (d *driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: name, VendorVersion: "1"}, nil
}

func (d *driver) CreateSnapshot(_ context.Context, r *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	d.creates.Add(1)
	if code := codes.Code(d.answer.Load()); code != codes.OK {
		return nil, status.Error(code, "not enough space")
	}
	return &csi.CreateSnapshotResponse{Snapshot: &csi.Snapshot{SnapshotId: r.Name, SourceVolumeId: r.SourceVolumeId,
		CreationTime: timestamppb.Now(), ReadyToUse: true}}, nil
}

func (d *driver) DeleteSnapshot(context.Context, *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	d.deletes.Add(1)
	return &csi.DeleteSnapshotResponse{}, nil
}

func must[T any](result T, err error) T {
	if err != nil {
		panic(err)
	}
	return result
}

// serve adds to the client without a server what an API server does: versions and conflicts, UIDs, no event without a change, and
// deletion once no finalizer is left.
func serve(client *fake.Clientset) {
	shown, stored := client.Tracker(), testing.NewObjectTracker(snapshotscheme.Scheme, snapshotscheme.Codecs.UniversalDecoder())
	write := testing.ObjectReaction(stored)
	var lock sync.Mutex
	version := 1
	client.PrependReactor("*", "*", func(action testing.Action) (bool, runtime.Object, error) {
		lock.Lock()
		defer lock.Unlock()
		resource, namespace, verb := action.GetResource(), action.GetNamespace(), action.GetVerb()
		var object runtime.Object
		var err error
		switch verb {
		case "delete":
			object, err = stored.Get(resource, namespace, action.(testing.DeleteAction).GetName())
		case "create", "update", "patch":
			_, object, err = write(action)
		default:
			return false, nil, nil
		}
		if err != nil {
			return true, nil, err
		}
		fields := must(meta.Accessor(object))
		if verb == "create" {
			fields.SetUID(types.UID("uid-" + fields.GetName()))
			fields.SetResourceVersion(strconv.Itoa(version))
			must(0, shown.Create(resource, object, namespace))
		}
		before := must(shown.Get(resource, namespace, fields.GetName()))
		if verb == "update" && fields.GetResourceVersion() != must(meta.Accessor(before)).GetResourceVersion() {
			must(0, stored.Update(resource, before, namespace))
			return true, nil, errors.NewConflict(resource.GroupResource(), fields.GetName(), fmt.Errorf("stale"))
		}
		if verb == "delete" && fields.GetDeletionTimestamp() == nil {
			now := metav1.Now()
			fields.SetDeletionTimestamp(&now)
		}
		if verb != "create" && equality.Semantic.DeepEqual(before, object) {
			return true, object, nil
		}
		version++
		fields.SetResourceVersion(strconv.Itoa(version))
		if fields.GetDeletionTimestamp() != nil && len(fields.GetFinalizers()) == 0 {
			must(0, stored.Delete(resource, namespace, fields.GetName()))
			return true, object, shown.Delete(resource, namespace, fields.GetName())
		}
		must(0, stored.Update(resource, object, namespace))
		return true, object, shown.Update(resource, object, namespace)
	})
}

func within(limit time.Duration, condition func() bool) bool {
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if condition() {
			return true
		}
	}
	return false
}

// deleted deletes a VolumeSnapshot whose creation was answered with first. If it stays, the driver answers then. It returns
// calls of CreateSnapshot after the deletion, calls of DeleteSnapshot, and two facts: the deletion without and with that answer.
func deleted(first, then codes.Code) (calls, deletes int32, before, after bool) {
	background, class, claim := context.Background(), "class", "claim"
	served := &driver{}
	served.answer.Store(uint32(first))
	listener := must(net.Listen("tcp", "127.0.0.1:0"))
	server := grpc.NewServer()
	defer server.Stop()
	csi.RegisterControllerServer(server, served)
	csi.RegisterIdentityServer(server, served)
	go server.Serve(listener)
	connection := must(grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials())))

	client := fake.NewSimpleClientset(&snapshots.VolumeSnapshotClass{ObjectMeta: metav1.ObjectMeta{Name: class}, Driver: name,
		DeletionPolicy: snapshots.VolumeSnapshotContentDelete})
	serve(client)
	kube := kubefake.NewSimpleClientset(
		&core.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: claim, UID: "claim"},
			Spec: core.PersistentVolumeClaimSpec{VolumeName: "volume"}, Status: core.PersistentVolumeClaimStatus{Phase: core.ClaimBound}},
		&core.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "volume"}, Spec: core.PersistentVolumeSpec{
			ClaimRef:               &core.ObjectReference{Namespace: "default", Name: claim, UID: "claim"},
			PersistentVolumeSource: core.PersistentVolumeSource{CSI: &core.CSIPersistentVolumeSource{Driver: name, VolumeHandle: "1"}}},
			Status: core.PersistentVolumeStatus{Phase: core.VolumeBound}})

	// The defaults are retries after a second to five minutes, and a resync every fifteen minutes.
	const resync = 10 * time.Second
	limits := func() workqueue.TypedRateLimiter[string] {
		return workqueue.NewTypedItemExponentialFailureRateLimiter[string](100*time.Millisecond, time.Second)
	}
	stop, group := make(chan struct{}), &sync.WaitGroup{}
	defer close(stop)
	left, right := snapshotinformers.NewSharedInformerFactory(client, resync),
		snapshotinformers.NewSharedInformerFactory(client, resync)
	volumes := informers.NewSharedInformerFactory(kube, 0)
	controller := common.NewCSISnapshotCommonController(client, kube, left.Snapshot().V1().VolumeSnapshots(),
		left.Snapshot().V1().VolumeSnapshotContents(), left.Snapshot().V1().VolumeSnapshotClasses(), nil, nil, nil,
		volumes.Core().V1().PersistentVolumeClaims(), volumes.Core().V1().PersistentVolumes(), nil, metrics.NewMetricsManager(),
		resync, limits(), limits(), limits(), limits(), false, false, false)
	beside := sidecar.NewCSISnapshotSideCarController(client, kube, name, right.Snapshot().V1().VolumeSnapshotContents(),
		right.Snapshot().V1().VolumeSnapshotClasses(), snapshotter.NewSnapshotter(connection), nil, time.Minute, resync,
		"snapshot", -1, "groupsnapshot", -1, false, limits(), false, nil, nil, limits())
	left.Start(stop)
	right.Start(stop)
	volumes.Start(stop)
	go controller.Run(1, stop, group)
	go beside.Run(1, stop, group)

	namespaced := client.SnapshotV1().VolumeSnapshots("default")
	must(namespaced.Create(background, &snapshots.VolumeSnapshot{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a"},
		Spec: snapshots.VolumeSnapshotSpec{VolumeSnapshotClassName: &class,
			Source: snapshots.VolumeSnapshotSource{PersistentVolumeClaimName: &claim}}}, metav1.CreateOptions{}))
	failed := within(time.Minute, func() bool {
		object := must(namespaced.Get(background, "a", metav1.GetOptions{}))
		return object.Status != nil && object.Status.Error != nil
	})
	if !failed {
		panic("the VolumeSnapshot has no error")
	}
	must(0, namespaced.Delete(background, "a", metav1.DeleteOptions{}))
	calls = served.creates.Load()
	gone := func() bool {
		contents := must(client.SnapshotV1().VolumeSnapshotContents().List(background, metav1.ListOptions{}))
		return len(must(namespaced.List(background, metav1.ListOptions{})).Items) == 0 && len(contents.Items) == 0
	}
	before = within(15*time.Second, gone)
	calls = served.creates.Load() - calls
	served.answer.Store(uint32(then))
	after = before || within(time.Minute, gone)
	return calls, served.deletes.Load(), before, after
}

func main() {
	klog.SetLogger(klog.New(nil))
	must(0, snapshotscheme.AddToScheme(scheme.Scheme))
	same := true
	for _, row := range []struct {
		first, then codes.Code
		before      bool
		deletes     int32
	}{
		{codes.Internal, codes.Internal, true, 0},
		{codes.ResourceExhausted, codes.Internal, false, 0},
		{codes.ResourceExhausted, codes.OK, false, 1},
	} {
		calls, deletes, before, after := deleted(row.first, row.then)
		fmt.Printf("%v: gone after deletion: %v (CreateSnapshot called another %d times)", row.first, before, calls)
		if !before {
			fmt.Printf(", gone after the answer %v: %v, DeleteSnapshot called %d times", row.then, after, deletes)
		}
		fmt.Println()
		same = same && before == row.before && after && deletes == row.deletes && (before || calls > 3)
	}
	if !same {
		os.Exit(1)
	}
}
GO
go mod tidy 2>/dev/null || exit 3
go build -o finding . || exit 1
echo "external-snapshotter 8.7.0"
# The client without a server has no streams of initial events.
KUBE_FEATURE_WatchListClient=false ./finding
