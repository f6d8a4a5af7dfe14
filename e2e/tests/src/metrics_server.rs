//! metrics-server, which reads the load of pods from kubelets and serves it as the API `metrics.k8s.io`.

use std::{
    net::{Ipv4Addr, TcpListener},
    path::PathBuf,
    process::Stdio,
};

use anyhow::{Context, Result};
use ferrovirt_e2e_cluster::plan::Plan;
use tokio::process::{Child, Command};

use crate::environment::kubeconfig;

/// Variable with the path of the program: `cluster build-metrics-server` prints it.
const PROGRAM: &str = "METRICS_SERVER";

/// A running metrics-server. Dropping it ends it.
pub struct MetricsServer {
    /// Its port on all addresses of this host.
    pub port: u16,
    folder: PathBuf,
    _process: Child,
}

impl MetricsServer {
    /// Starts it on a free port of this host, with the administrator's rights on the test cluster; `None` without the program.
    ///
    /// # Errors
    /// Fails if it does not start.
    pub fn start(plan: &Plan) -> Result<Option<Self>> {
        let Some(program) = std::env::var_os(PROGRAM).filter(|program| !program.is_empty()) else { return Ok(None) };
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).context("no free port for metrics-server")?;
        let port = listener.local_addr()?.port();
        drop(listener);
        let folder = std::env::temp_dir().join(format!("metrics-server-{port}"));
        let flag = |name: &str, value: String| format!("--{name}={value}");
        let cluster = kubeconfig().display().to_string();
        let mut command = Command::new(program);
        command
            .args(
                ["kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"]
                    .map(|name| flag(name, cluster.clone())),
            )
            .args([
                flag("secure-port", port.to_string()),
                flag("cert-dir", folder.display().to_string()),
                flag("kubelet-certificate-authority", plan.pki().join("ca.crt").display().to_string()),
                flag("kubelet-preferred-address-types", "InternalIP".to_owned()),
                // The shortest interval.
                flag("metric-resolution", "10s".to_owned()),
                flag("kubelet-request-timeout", "5s".to_owned()),
            ])
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let process = command.spawn().context("cannot start metrics-server")?;
        Ok(Some(Self { port, folder, _process: process }))
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
