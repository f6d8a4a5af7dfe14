//! Conformance of admission webhooks: the AdmissionReview protocol, and well-formed answers to whatever comes.
//!
//! Runs against any HTTPS server of the webhooks: `WEBHOOK_URL`, with the PEM file `WEBHOOK_CA` its certificate is
//! checked; by default against virt-api of the cluster under test (`make e2e`). The URL holds all that stands in front of
//! the webhooks' own paths. For virt-api that includes the segment without which it answers nothing, which the webhook
//! configurations show to administrators and which changes hourly:
//!
//! ```console
//! $ kubectl get validatingwebhookconfiguration virt-api-validator -o jsonpath='{.webhooks[0].clientConfig.service.path}'
//! /admission/SEGMENT/pod-eviction-validate
//! $ WEBHOOK_URL=https://ADDRESS/admission/SEGMENT cargo test -p ferrovirt-e2e-tests --test conformance
//! ```

#![allow(missing_docs, reason = "tests say what they are by their names")]

mod answers;
mod bodies;
mod load;
mod objects;
mod protocol;
mod reviews;

use anyhow::Result;
use ferrovirt_e2e_tests::webhook::Endpoint;

/// Runs a test against the server, and asks the server afterwards whether it lives.
fn conformance<F>(body: F)
where
    F: AsyncFnOnce(&Endpoint) -> Result<()>,
{
    let told: Result<()> = (|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let endpoint = Endpoint::from_environment().await?;
            body(&endpoint).await?;
            lives(&endpoint).await
        })
    })();
    if let Err(error) = told {
        #[expect(clippy::panic, reason = "how a test fails")]
        {
            panic!("{error:#}");
        }
    }
}

/// The server takes new connections, and still tells right from wrong.
async fn lives(endpoint: &Endpoint) -> Result<()> {
    let mut connection = endpoint.connect().await?;
    let good = reviews::Review::create("/virtualmachines-validate", objects::vm());
    answers::allowed(&connection.review(good.path, good.body()).await?, &good.uid)?;
    let bad = reviews::Review::create("/virtualmachines-validate", objects::impossible_vm());
    answers::refused(&connection.review(bad.path, bad.body()).await?, &bad.uid)?;
    Ok(())
}
