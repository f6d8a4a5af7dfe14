//! Conformance of admission webhooks: the AdmissionReview protocol, and well-formed answers to any request.
//!
//! Runs against virt-api of the cluster under test (`make e2e`), or against any HTTPS server of the webhooks: `WEBHOOK_URL`,
//! verified with the PEM file `WEBHOOK_CA`. The URL contains everything before the paths of the webhooks. For virt-api that
//! includes the secret segment, which changes hourly and which the webhook configurations show to administrators:
//!
//! ```console
//! $ kubectl get validatingwebhookconfiguration virt-api-validator -o jsonpath='{.webhooks[0].clientConfig.service.path}'
//! /admission/SEGMENT/pod-eviction-validate
//! $ WEBHOOK_URL=https://ADDRESS/admission/SEGMENT cargo test -p ferrovirt-e2e-tests --test conformance
//! ```

#![allow(missing_docs, reason = "names of tests describe them")]

mod answers;
mod bodies;
mod load;
mod objects;
mod protocol;
mod reviews;

use anyhow::Result;
use ferrovirt_e2e_tests::webhook::Endpoint;
use tokio::sync::Mutex;

/// Held by a test whose connections are forwarded: the server sees one address for all, and closes its idle ones for new ones.
static ONE_ADDRESS: Mutex<()> = Mutex::const_new(());

/// Runs a test against the server, and checks afterwards that the server works.
fn conformance<F>(body: F)
where
    F: AsyncFnOnce(&Endpoint) -> Result<()>,
{
    let result: Result<()> = (|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let endpoint = Endpoint::from_environment().await?;
            let _turn = if endpoint.is_direct() { None } else { Some(ONE_ADDRESS.lock().await) };
            body(&endpoint).await?;
            lives(&endpoint).await
        })
    })();
    if let Err(error) = result {
        #[expect(clippy::panic, reason = "fails the test")]
        {
            panic!("{error:#}");
        }
    }
}

/// Checks that the server accepts new connections, allows a valid object and denies an invalid one.
async fn lives(endpoint: &Endpoint) -> Result<()> {
    let mut connection = endpoint.connect().await?;
    let good = reviews::Review::create("/virtualmachines-validate", objects::vm());
    answers::allowed(&connection.review(good.path, good.body()).await?, &good.uid)?;
    let bad = reviews::Review::create("/virtualmachines-validate", objects::impossible_vm());
    answers::refused(&connection.review(bad.path, bad.body()).await?, &bad.uid)?;
    Ok(())
}
