#!/bin/sh
# Runs a selection of stories on the cluster of KUBECONFIG, for `make versions`. TESTS is the command of cargo,
# SELECTOR the program `stories`. With
# IMAGE_VOLUMES=off it runs the story about clusters whose feature gate ImageVolume is off.
set -eu
cd "$(dirname "$0")/.."

if [ "${IMAGE_VOLUMES:-on}" = off ]; then
    stories='image_volumes::container_disks_are_refused_by_name_where_image_volumes_are_off
        installation::helm_test_boots_a_vmi_and_leaves_nothing'
else
    # What depends on the version of Kubernetes: definitions, admission policies, RBAC, pods, their volumes, subresources and probes,
    # eviction, in-place resize, and the names of its metrics and conditions.
    stories='
        boot::vm_boots_from_container_disk_and_user_works_on_its_console
        controller_rights::
        definitions::
        hotplug::volumes_are_plugged_into_a_running_vm_and_keep_their_data
        installation::
        lifecycle::
        live_resize::
        metrics_access::
        migration::vm_moves_to_another_node_and_its_guest_goes_on
        evacuation_migration::
        network::
        nics::interfaces_are_plugged_into_a_running_guest_and_leave_it
        pods::
        rights::
        scheduling::
        workload_updates::'
fi
# shellcheck disable=SC2086
$TESTS --test e2e -- --list | "$SELECTOR" select $stories
exec e2e/run.sh
