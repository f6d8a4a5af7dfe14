//! libvirt behind the traits [`Hypervisor`] and [`Domain`](crate::hypervisor::Domain): its daemon (`daemon`), the connection
//! (`connection`), the calls for a domain (`domain`) and for its migration (`migration`), its numbers (`lifecycle`) and statistics
//! (`stats`) in the protocol's form. [`capabilities`] collects those of a node. `callbacks` is the only place of this crate with unsafe code.

mod callbacks;
pub mod capabilities;
mod connection;
mod daemon;
mod domain;
mod error;
mod lifecycle;
mod migration;
mod stats;

use std::{os::unix::net::UnixStream, sync::Arc, time::Duration};

use futures::future::BoxFuture;

use self::{
    connection::Connection,
    daemon::{Daemon, DaemonProgram},
    domain::LibvirtDomain,
};
use crate::{
    hypervisor::{Call, Domain, Hypervisor, StartError},
    paths::Paths,
    tasks::Tasks,
};

/// Time limit of a connection.
const CONNECT_DEADLINE: Duration = Duration::from_secs(60);

/// libvirt's daemon for one domain.
#[derive(Debug)]
pub(crate) struct Libvirt {
    paths: Paths,
    tasks: Tasks,
    /// Name of the domain.
    domain: String,
    log_filters: Option<String>,
    program: Option<DaemonProgram>,
    daemon: Option<Daemon>,
}

impl Libvirt {
    /// Creates the hypervisor of a pod; nothing is started.
    pub(crate) const fn new(paths: Paths, tasks: Tasks, domain: String, log_filters: Option<String>) -> Self {
        Self { paths, tasks, domain, log_filters, program: None, daemon: None }
    }
}

impl Hypervisor for Libvirt {
    fn write_cache(&self, files: &[protocol::CacheFile]) -> Result<(), StartError> {
        daemon::write_cache(&self.paths, files)
    }

    fn start(&mut self) -> Result<(), StartError> {
        if self.daemon.is_none() {
            let mut program = DaemonProgram::find()?;
            program.log_filters.clone_from(&self.log_filters);
            daemon::configure(&program, &self.paths)?;
            self.daemon = Some(Daemon::start(program.clone(), self.paths.clone(), &self.tasks));
            self.program = Some(program);
        }
        Ok(())
    }

    fn connect(&self) -> Call<Option<Arc<dyn Domain>>> {
        let listening =
            self.program.as_ref().filter(|program| UnixStream::connect(program.socket(&self.paths)).is_ok());
        let Some(program) = listening else { return Box::pin(std::future::ready(Ok(None))) };
        let (uri, name) = (program.uri(&self.paths), self.domain.clone());
        Box::pin(async move {
            let connection = Connection::open(uri, CONNECT_DEADLINE).await?;
            Ok(Some(Arc::new(LibvirtDomain::new(connection, name)) as Arc<dyn Domain>))
        })
    }

    fn stop(&mut self) -> BoxFuture<'static, ()> {
        let daemon = self.daemon.take();
        Box::pin(async move {
            if let Some(daemon) = daemon {
                daemon.stop().await;
            }
        })
    }
}
