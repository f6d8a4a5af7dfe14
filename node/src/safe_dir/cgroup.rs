//! The pod of a process, from its control groups.
//!
//! `/proc/<pid>/cgroup` has one line per hierarchy, `<id>:<controllers>:<path>`: one hierarchy with id 0 for cgroup v2,
//! several for v1, and both on hybrid hosts. kubelet uses for a pod with UID `1a-2b`:
//! - `/kubepods/burstable/pod1a-2b/...` with its cgroupfs driver,
//! - `/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1a_2b.slice/...` with its systemd driver.
//!
//! The path can have a prefix (kubelet's `--cgroup-root`, a node that is itself a container) and continues with the
//! container. systemd prefixes the name of a slice with those of its parents: with `--cgroup-root=/kubelet`, as in kind, it
//! is `/kubelet.slice/kubelet-kubepods.slice/...-kubepods-burstable-pod1a_2b.slice/...`. On hybrid hosts the empty v2
//! hierarchy is `/`.

use std::fmt;

/// Longest content of `/proc/<pid>/cgroup` that is read.
pub(super) const LIMIT: usize = 64 * 1024;

/// Reason why the control groups of a process do not prove that it is in the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// No hierarchy names a pod.
    NoPod,
    /// A hierarchy names another pod.
    OtherPod(String),
    /// The text does not have the format of `/proc/<pid>/cgroup`.
    Unreadable,
    /// The argument is not the UID of a pod.
    NotAUid,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoPod => f.write_str("its control groups name no pod"),
            Self::OtherPod(component) => write!(f, "it is in control group {component:?}"),
            Self::Unreadable => f.write_str("its control groups cannot be parsed"),
            Self::NotAUid => f.write_str("the UID of the pod is invalid"),
        }
    }
}

/// Checks that every hierarchy that names a pod names the pod `uid`, and that at least one does.
pub(super) fn require_pod(content: &str, uid: &str) -> Result<(), Mismatch> {
    // UIDs of pods are UUIDs, those of static pods hex digests.
    if uid.len() < 16 || uid.len() > 64 || !uid.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
        return Err(Mismatch::NotAUid);
    }
    let mut found = false;
    for line in content.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(id), Some(_), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            return Err(Mismatch::Unreadable);
        };
        if id.parse::<u32>().is_err() || !path.starts_with('/') {
            return Err(Mismatch::Unreadable);
        }
        // Of nested pods (a cluster whose nodes are pods) the innermost belongs to this node's kubelet.
        if let Some((component, pod)) = path.split('/').rev().find_map(|part| Some((part, pod_of(part)?))) {
            if pod != uid {
                return Err(Mismatch::OtherPod(component.to_owned()));
            }
            found = true;
        }
    }
    if found { Ok(()) } else { Err(Mismatch::NoPod) }
}

/// Returns the UID of the pod in a component of a control group path.
fn pod_of(component: &str) -> Option<String> {
    if let Some(slice) = component.strip_suffix(".slice") {
        let name = match slice.rsplit_once("-kubepods-") {
            Some((_root, name)) => name,
            None => slice.strip_prefix("kubepods-")?,
        };
        let name = name.strip_prefix("burstable-").or_else(|| name.strip_prefix("besteffort-")).unwrap_or(name);
        return Some(name.strip_prefix("pod")?.replace('_', "-"));
    }
    let uid = component.strip_prefix("pod")?;
    // A user's control group can have a name like "podman" or "pods".
    let plausible = uid.len() >= 16 && uid.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    plausible.then(|| uid.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "c2b5a8f0-11d2-4a6c-9d5e-0123456789ab";

    fn check(content: &str) -> Result<(), Mismatch> {
        require_pod(content, UID)
    }

    #[test]
    fn every_format_of_kubelet_is_recognised() {
        for content in [
            "0::/kubepods/burstable/podc2b5a8f0-11d2-4a6c-9d5e-0123456789ab/4f1c\n",
            "0::/kubepods/podc2b5a8f0-11d2-4a6c-9d5e-0123456789ab/4f1c\n",
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podc2b5a8f0_11d2_4a6c_9d5e_0123456789ab.slice/cri-containerd-4f1c.scope\n",
            "0::/kubepods.slice/kubepods-podc2b5a8f0_11d2_4a6c_9d5e_0123456789ab.slice/crio-4f1c.scope/container\n",
            "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podc2b5a8f0_11d2_4a6c_9d5e_0123456789ab.slice/x.scope",
            "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-podc2b5a8f0_11d2_4a6c_9d5e_0123456789ab.slice/cri-containerd-4f1c.scope\n",
            "0::/../../kubelet-kubepods-podc2b5a8f0_11d2_4a6c_9d5e_0123456789ab.slice/cri-containerd-4f1c.scope\n",
            "12:pids:/kubepods/besteffort/podc2b5a8f0-11d2-4a6c-9d5e-0123456789ab/4f\n4:memory:/kubepods/besteffort/podc2b5a8f0-11d2-4a6c-9d5e-0123456789ab/4f\n1:name=systemd:/\n0::/\n",
            "3:cpu,cpuacct:/outer/kubepods/podc2b5a8f0-11d2-4a6c-9d5e-0123456789ab/x\n0::/\n",
            "0::/../../podc2b5a8f0-11d2-4a6c-9d5e-0123456789ab/4f1c\n",
            "0::/kubepods/pod00000000-0000-0000-0000-000000000000/ctr/kubepods/burstable/podc2b5a8f0-11d2-4a6c-9d5e-0123456789ab/4f\n",
        ] {
            assert_eq!(check(content), Ok(()), "{content}");
        }
    }

    #[test]
    fn a_process_of_another_pod_is_rejected() {
        let other = "pod11111111-11d2-4a6c-9d5e-0123456789ab";
        for content in [
            format!("0::/kubepods/burstable/{other}/4f1c\n"),
            format!("4:memory:/kubepods/podc2b5a8f0-11d2-4a6c-9d5e-0123456789ab/a\n3:cpu:/kubepods/{other}/a\n"),
            format!("0::/kubepods/podc2b5a8f0-11d2-4a6c-9d5e-0123456789ab/kubepods/{other}\n"),
            format!("0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-{}.slice/x.scope\n", other.replace('-', "_")),
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod11111111_11d2_4a6c_9d5e_0123456789ab.slice/x".to_owned(),
        ] {
            assert!(matches!(check(&content), Err(Mismatch::OtherPod(_))), "{content}");
        }
    }

    #[test]
    fn a_process_in_no_pod_is_rejected() {
        for content in [
            "",
            "0::/\n",
            "0::/system.slice/containerd.service\n",
            "0::/user.slice/podman\n",
            "0::/c2b5a8f0-11d2-4a6c-9d5e-0123456789ab\n",
            "0::/podc2b5a8f0-11d2-4a6c-9d5e-0123456789abZ\n",
            "0::/x-podc2b5a8f0_11d2_4a6c_9d5e_0123456789ab.slice/y\n",
            "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/x.scope\n",
        ] {
            assert_eq!(check(content), Err(Mismatch::NoPod), "{content}");
        }
    }

    #[test]
    fn text_of_another_format_is_rejected() {
        for content in ["nonsense", "0:", "0::", "0::relative", "x::/kubepods", "\n\n", ":::::", "-1::/a", "0:a"] {
            assert_eq!(check(content), Err(Mismatch::Unreadable), "{content:?}");
        }
    }

    #[test]
    fn an_invalid_uid_matches_nothing() {
        for uid in ["", "a", "..", "../../../etc/passwd..", "c2b5a8f0-11d2-4a6c-9d5e-0123456789a/", &"a".repeat(65)] {
            assert_eq!(require_pod("0::/kubepods/pod/x", uid), Err(Mismatch::NotAUid), "{uid:?}");
        }
    }
}
