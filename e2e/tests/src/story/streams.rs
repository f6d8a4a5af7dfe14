//! Open streams by the metrics of virt-api and virt-handler.

use std::time::Duration;

use anyhow::{Result, bail};
use tokio::time::{Instant, sleep};

use super::Story;
use crate::environment::TIMEOUT;

/// Numbers of open streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenStreams {
    /// Streams to the story's VMIs in all pods of virt-api.
    pub api: u64,
    /// Streams to any VMI in all pods of virt-handler.
    pub handler: u64,
}

impl Story {
    /// Returns the numbers of open streams.
    ///
    /// # Errors
    /// Fails if metrics cannot be read.
    pub async fn open_streams(&self) -> Result<OpenStreams> {
        let own = format!("namespace=\"{}\"", self.namespace);
        let api = self.count("virt-api", |line| {
            line.starts_with("kubevirt_") && line.contains("_active_") && line.contains(&own)
        });
        let handler = self.count("virt-handler", |line| line.starts_with("ferrovirt_handler_streams{"));
        Ok(OpenStreams { api: api.await?, handler: handler.await? })
    }

    /// Waits until virt-api has no stream to the story's VMIs, and, if `alone`, virt-handler has none at all.
    ///
    /// # Errors
    /// Fails if some remain after two minutes.
    pub async fn no_streams_left(&self, alone: bool) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            // A pod that is being replaced has no metrics.
            let open = self.open_streams().await;
            match &open {
                Ok(open) if open.api == 0 && (open.handler == 0 || !alone) => return Ok(()),
                _ if Instant::now() < deadline => sleep(Duration::from_secs(1)).await,
                Ok(open) => bail!("{open:?} are open after their clients closed"),
                Err(error) => bail!("streams cannot be counted: {error:#}"),
            }
        }
    }

    /// Returns the sum of the matching metrics of a component's pods.
    async fn count(&self, component: &str, matches: impl Fn(&str) -> bool) -> Result<u64> {
        let lines = self.metrics(component).await?;
        let values =
            lines.iter().filter(|line| matches(line)).filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        Ok(values.map(|value| value as u64).sum())
    }
}
