//! Selects the cluster: that of this working tree, or that of the user's KUBECONFIG.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    components, deps,
    error::{Error, Result},
    kubectl::Kubectl,
    lock::lock,
    plan::Plan,
    progress::Progress,
    up::{self, Size},
};

/// A cluster and the programs to use it.
#[derive(Clone, Debug)]
pub struct Target {
    /// kubectl for the cluster.
    pub kubectl: Kubectl,
    /// Its kubeconfig.
    pub kubeconfig: PathBuf,
    /// True for the cluster of this working tree, whose nodes import images directly.
    pub own: bool,
    /// Folder of kubectl and helm; `None` if they are on the PATH.
    pub bin: Option<PathBuf>,
}

impl Target {
    /// Returns the cluster of KUBECONFIG, or that of this working tree, which is brought up if needed.
    ///
    /// # Errors
    /// Fails if a program is missing or the cluster does not come up.
    pub fn ready(plan: &Plan, size: Size, progress: &Progress) -> Result<Self> {
        if let Some(kubeconfig) = foreign(plan, std::env::var_os("KUBECONFIG").map(PathBuf::from)) {
            progress.step(format!("using the cluster of KUBECONFIG={}", kubeconfig.display()));
            for tool in ["kubectl", "helm"] {
                if !deps::exists(tool) {
                    return Err(Error::Refused(format!("{tool} is not on the PATH; KUBECONFIG requires it")));
                }
            }
            let kubectl = Kubectl::new(Path::new(""), kubeconfig.clone());
            return Ok(Self { kubectl, kubeconfig, own: false, bin: None });
        }
        let _lock = lock(plan, progress)?;
        up::up(plan, size, progress)?;
        let bin = components::bin(plan)?;
        let kubeconfig = plan.kubeconfig();
        Ok(Self { kubectl: Kubectl::new(&bin, kubeconfig.clone()), kubeconfig, own: true, bin: Some(bin) })
    }

    /// Returns a helm command for the cluster.
    #[must_use]
    pub fn helm(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.bin.as_ref().map_or(PathBuf::from("helm"), |bin| bin.join("helm")));
        command.args(arguments).env("KUBECONFIG", &self.kubeconfig);
        command
    }

    /// Returns the PATH for commands that use the cluster: kubectl of the server's version, and our plugin.
    #[must_use]
    pub fn path(&self, plan: &Plan) -> String {
        let inherited = std::env::var("PATH").unwrap_or_default();
        let ours = plan.build().join("bin").display().to_string();
        let bin = self.bin.iter().map(|bin| bin.display().to_string());
        std::iter::once(ours).chain(bin).chain([inherited]).collect::<Vec<_>>().join(":")
    }
}

/// Returns the kubeconfig of another cluster, if KUBECONFIG names one. The file of our own cluster does not count, even if the
/// cluster is down, since `up` advises to export it.
#[must_use]
pub fn foreign(plan: &Plan, named: Option<PathBuf>) -> Option<PathBuf> {
    let named = named.filter(|path| !path.as_os_str().is_empty())?;
    let own = plan.kubeconfig();
    let same = named == own
        || fs::canonicalize(&named).is_ok_and(|named| fs::canonicalize(&own).is_ok_and(|own| own == named));
    (!same).then_some(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_kubeconfig_is_not_a_foreign_cluster() {
        let plan = Plan::new(PathBuf::from("/src"), 0).unwrap();
        assert_eq!(foreign(&plan, None), None);
        assert_eq!(foreign(&plan, Some(PathBuf::new())), None);
        assert_eq!(foreign(&plan, Some(PathBuf::from("/src/build/kubeconfig"))), None);
        assert_eq!(foreign(&plan, Some("/etc/other".into())), Some("/etc/other".into()));
    }
}
