//! Storage whose volumes several nodes can use at a time, by provisioner and parameters of the class: the table of CDI
//! (`pkg/storagecapabilities`), without what says nothing about that.

use std::collections::BTreeMap;

/// The kinds of volumes that several nodes can use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Shared {
    /// File systems.
    pub files: bool,
    /// Block devices.
    pub blocks: bool,
}

const FILES: Shared = Shared { files: true, blocks: false };
const BLOCKS: Shared = Shared { files: false, blocks: true };
const NONE: Shared = Shared { files: false, blocks: false };

/// A parameter of a class, with a test of its value in lower case.
type Test = (&'static str, fn(&str) -> bool);

/// A parameter that every class passes.
const ANY: Test = ("", |_| true);
/// File system of a volume.
const FS_TYPE: &str = "csi.storage.k8s.io/fstype";
const NFS: Test = (FS_TYPE, |value| value.contains("nfs"));
const NFS_PROTOCOL: Test = ("protocol", |value| value == "nfs");
const NFS_MOUNT: Test = ("sharedv4_mount_options", |value| value.contains("vers=3.0") && value.contains("nolock"));

/// Provisioner, parameter, and what is shared. The first row that fits counts.
const TABLE: [(&str, Test, Shared); 46] = [
    ("nfs.csi.k8s.io", ANY, FILES),
    ("k8s-sigs.io/nfs-subdir-external-provisioner", ANY, FILES),
    ("cephfs.csi.ceph.com", ANY, FILES),
    ("rook-ceph.cephfs.csi.ceph.com", ANY, FILES),
    ("openshift-storage.cephfs.csi.ceph.com", ANY, FILES),
    ("kubernetes.io/rbd", ANY, BLOCKS),
    ("rbd.csi.ceph.com", ANY, BLOCKS),
    ("rook-ceph.rbd.csi.ceph.com", ANY, BLOCKS),
    ("openshift-storage.rbd.csi.ceph.com", ANY, BLOCKS),
    ("linstor.csi.linbit.com", ANY, BLOCKS),
    ("csi-isilon.dellemc.com", ANY, FILES),
    ("csi-unity.dellemc.com", NFS_PROTOCOL, FILES),
    ("csi-unity.dellemc.com", ANY, BLOCKS),
    ("csi-vxflexos.dellemc.com", NFS, FILES),
    ("csi-vxflexos.dellemc.com", ANY, BLOCKS),
    ("csi-powermax.dellemc.com", NFS, FILES),
    ("csi-powermax.dellemc.com", ANY, BLOCKS),
    ("csi-powerstore.dellemc.com", NFS, FILES),
    ("csi-powerstore.dellemc.com", ANY, BLOCKS),
    ("ebs.csi.aws.com", ("type", |value| value == "io2"), BLOCKS),
    ("efs.csi.aws.com", ANY, FILES),
    ("kubernetes.io/azure-file", ANY, FILES),
    ("file.csi.azure.com", ANY, FILES),
    ("pd.csi.storage.gke.io", ("type", |value| value.starts_with("hyperdisk-balanced")), BLOCKS),
    ("hspc.csi.hitachi.com", ANY, BLOCKS),
    ("csi.hpe.com", ANY, BLOCKS),
    ("spectrumscale.csi.ibm.com", ANY, FILES),
    ("block.csi.ibm.com", ANY, BLOCKS),
    ("kubernetes.io/portworx-volume", NFS_MOUNT, FILES),
    ("kubernetes.io/portworx-volume", ANY, Shared { files: true, blocks: true }),
    ("pxd.portworx.com", ("backend", |value| value == "pure_block"), BLOCKS),
    ("pxd.portworx.com", ("backend", |value| value == "pure_fa_file"), FILES),
    ("pxd.portworx.com", NFS_MOUNT, FILES),
    ("pxd.portworx.com", ANY, Shared { files: true, blocks: true }),
    ("csi.trident.netapp.io", ("backendtype", |value| value.starts_with("ontap-nas")), FILES),
    ("csi.trident.netapp.io", ("backendtype", |value| value.starts_with("ontap-san")), BLOCKS),
    ("manila.csi.openstack.org", ANY, FILES),
    ("infinibox-csi-driver", ("storage_protocol", |value| value.starts_with("nfs")), FILES),
    ("infinibox-csi-driver", ("storage_protocol", |value| ["iscsi", "fc", "nvme"].contains(&value)), BLOCKS),
    ("csi.vsphere.vmware.com", NFS, FILES),
    ("csi.huawei.com", NFS_PROTOCOL, FILES),
    ("csi.huawei.com", ANY, BLOCKS),
    ("kubesan.gitlab.io", ANY, BLOCKS),
    ("driver.longhorn.io", ("migratable", |value| value == "true"), BLOCKS),
    ("driver.longhorn.io", ("nfsoptions", |value| !value.is_empty()), FILES),
    ("blockvolume.csi.oraclecloud.com", ANY, BLOCKS),
];

/// Returns what several nodes can use of a class. An unknown provisioner shares nothing.
pub(crate) fn of(provisioner: &str, parameters: Option<&BTreeMap<String, String>>) -> Shared {
    let value = |name: &str| {
        let found = parameters.into_iter().flatten().find(|(key, _)| key.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.to_ascii_lowercase()).unwrap_or_default()
    };
    let row = TABLE.iter().find(|(name, (parameter, fits), _)| *name == provisioner && fits(&value(parameter)));
    row.map_or(NONE, |(.., shared)| *shared)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_are_shared_by_driver_and_parameters() {
        for (provisioner, parameters, expected) in [
            ("nfs.csi.k8s.io", &[][..], FILES),
            ("rook-ceph.rbd.csi.ceph.com", &[], BLOCKS),
            ("rancher.io/local-path", &[], NONE),
            ("ebs.csi.aws.com", &[("type", "gp3")], NONE),
            ("ebs.csi.aws.com", &[("type", "io2")], BLOCKS),
            ("csi.trident.netapp.io", &[("backendType", "ontap-nas-economy")], FILES),
            ("csi.trident.netapp.io", &[], NONE),
            ("driver.longhorn.io", &[("migratable", "true"), ("nfsOptions", "vers=4")], BLOCKS),
            ("driver.longhorn.io", &[("fsType", "ext4")], NONE),
            ("csi-powermax.dellemc.com", &[("csi.storage.k8s.io/fstype", "NFS")], FILES),
            ("csi-powermax.dellemc.com", &[("csi.storage.k8s.io/fstype", "xfs")], BLOCKS),
            ("pxd.portworx.com", &[("sharedv4_mount_options", "vers=3.0,nolock")], FILES),
        ] {
            let map = parameters.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
            assert_eq!(of(provisioner, Some(&map)), expected, "{provisioner} {parameters:?}");
        }
    }
}
