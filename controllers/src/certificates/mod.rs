//! The certificate authority of the installation, the certificates that it signs, and the bundle.
//!
//! ```text
//!  80 % of life over, or other life      bundle holds both, SETTLE passed
//!  current ───────────────────> current + next ─────────────────────────> next is current
//!                                                                         leaves are renewed
//! ```
//! The bundle holds every authority that may have signed something still valid: new ones are in it before they sign,
//! old ones until they end. All times are by the wall clock, so that a process that starts late catches up.
//!
//! The clock of a leader can be ahead. What it makes is not valid yet for others, and is replaced by the first leader whose clock is
//! right. An authority that seems to have ended is replaced beside the old one, too, and the old one stays in the bundle for as long
//! as something that it signed can be valid.

mod authority;
mod bundle;
mod controller;
mod leaf;
mod request;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use api::{kubevirt::spec::KubeVirtCertificateRotateStrategy, tls};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::{
    ByteString,
    api::core::v1::{ConfigMap, Secret},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

pub(crate) use self::controller::{Certificates, Requests};
use self::{
    authority::{Authority, CLOCK_SKEW, CertificateFacts},
    bundle::inject,
    leaf::Role,
};
use crate::{
    resources::bundle_carriers::BundleCarrier,
    runtime::{Decision, Effect, Kind},
};

/// Time that a new authority is in the bundle before it signs. Every process has the bundle by then.
const SETTLE: SignedDuration = SignedDuration::from_mins(2);
/// Least time before its end at which an authority is replaced: the next one must settle first.
const LEAST_OVERLAP: SignedDuration = SignedDuration::from_mins(4);
/// Shortest life of a certificate: shorter ones would be renewed without end.
const SHORTEST_LIFE: SignedDuration = SignedDuration::from_mins(10);
/// Longest life of a certificate: later ends are out of range.
const LONGEST_LIFE: SignedDuration = SignedDuration::from_hours(100 * 365 * 24);
/// Difference from the configured life up to which a certificate is not replaced: its dates are in seconds.
const LIFE_TOLERANCE: SignedDuration = SignedDuration::from_mins(1);
/// Least time that a leaf serves before it is replaced.
const LEAST_USE: SignedDuration = SignedDuration::from_mins(1);
/// Authorities in the bundle at most.
const BUNDLE_LIMIT: usize = 8;
/// Longest time between decisions, so that a changed clock is noticed.
const LONGEST_WAIT: Duration = Duration::from_secs(1800);
/// Annotation of the authority's Secret: since when the next authority is in the bundle.
const NEXT_SINCE: &str = "ferrovirt.io/next-published-at";
/// Annotation of a leaf's Secret: fingerprint of the authority that signed it.
const ISSUER: &str = "ferrovirt.io/issuer";
const NEXT_CERT_KEY: &str = "next.crt";
const NEXT_KEY_KEY: &str = "next.key";

/// The error of a certificate that cannot be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CertificateError {
    /// The library failed.
    #[error("certificate cannot be made")]
    Make(#[source] rcgen::Error),
    /// A date is out of range.
    #[error("life of the certificate is out of range")]
    Life,
    /// The object cannot be written as JSON.
    #[error("object cannot be written as JSON")]
    Json(#[source] serde_json::Error),
}

/// Lives of certificates, and the times of their replacement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lives {
    /// Life of an authority.
    pub authority: SignedDuration,
    /// Time before its end at which an authority is replaced.
    pub authority_before: SignedDuration,
    /// Life of a leaf.
    pub leaf: SignedDuration,
    /// Time before its end at which a leaf is replaced.
    pub leaf_before: SignedDuration,
}

impl Default for Lives {
    fn default() -> Self {
        Self::of(SignedDuration::from_hours(7 * 24), None, SignedDuration::from_hours(24), None)
    }
}

impl Lives {
    fn of(
        authority: SignedDuration,
        authority_before: Option<SignedDuration>,
        leaf: SignedDuration,
        leaf_before: Option<SignedDuration>,
    ) -> Self {
        let [authority, leaf] = [authority, leaf].map(|life| life.clamp(SHORTEST_LIFE, LONGEST_LIFE));
        let fifth = |life: SignedDuration| SignedDuration::from_secs(life.as_secs() / 5);
        Self {
            authority,
            authority_before: authority_before
                .unwrap_or(fifth(authority))
                .clamp(LEAST_OVERLAP, authority.saturating_sub(LEAST_USE)),
            leaf,
            leaf_before: leaf_before.unwrap_or(fifth(leaf)).min(leaf.saturating_sub(LEAST_USE)),
        }
    }

    /// Returns the configured lives. Invalid values are replaced by the default.
    #[must_use]
    pub(crate) fn from_strategy(strategy: &KubeVirtCertificateRotateStrategy) -> Self {
        let Some(signed) = &strategy.self_signed else { return Self::default() };
        let read = |text: Option<&String>| {
            let parsed = api::duration::parse(text?).ok()?;
            SignedDuration::try_from(parsed).ok().filter(|life| !life.is_zero())
        };
        let defaults = Self::default();
        let authority = signed.ca.as_ref();
        let leaf = signed.server.as_ref();
        let authority_life = read(authority.and_then(|config| config.duration.as_ref()))
            .or_else(|| read(signed.ca_rotate_interval.as_ref()))
            .unwrap_or(defaults.authority);
        let leaf_life = read(leaf.and_then(|config| config.duration.as_ref()))
            .or_else(|| read(signed.cert_rotate_interval.as_ref()))
            .unwrap_or(defaults.leaf);
        let authority_before = read(authority.and_then(|config| config.renew_before.as_ref()))
            .or_else(|| read(signed.ca_overlap_interval.as_ref()))
            .filter(|before| *before < authority_life);
        let leaf_before =
            read(leaf.and_then(|config| config.renew_before.as_ref())).filter(|before| *before < leaf_life);
        Self::of(authority_life, authority_before, leaf_life, leaf_before)
    }
}

/// Returns the names of the Secrets with leaves.
pub(crate) fn leaf_secrets() -> [&'static str; 3] {
    Role::ALL.map(Role::secret)
}

/// Everything that decisions about certificates depend on.
pub(crate) struct Observed {
    /// Install namespace.
    pub namespace: Arc<str>,
    /// The authority's Secret.
    pub authority: Option<Arc<Secret>>,
    /// The bundle's ConfigMap.
    pub bundle: Option<Arc<ConfigMap>>,
    /// Secrets of leaves by name.
    pub leaves: BTreeMap<String, Arc<Secret>>,
    /// Lives of certificates.
    pub lives: Lives,
    /// True while there is a KubeVirt object. Without one, nothing says that other lives are wanted.
    pub is_configured: bool,
    /// Objects that hold a copy of the bundle.
    pub carriers: Vec<(Kind, Arc<BundleCarrier>)>,
    /// The current time.
    pub now: Timestamp,
}

/// A change of certificates. Each is made only after the former ones have taken effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Create the first authority, or replace one without a key.
    MakeAuthority,
    /// Create the next authority beside the current one.
    StageAuthority,
    /// Record the time since which the bundle holds the next authority.
    MarkPublished,
    /// Let the next authority sign.
    PromoteAuthority,
    /// Write this bundle.
    Publish(String),
    /// Create the certificate of a role.
    Issue(Role),
}

/// Decides on authority, bundle and leaves. Pure; [`decide`] carries the steps out.
pub(crate) fn plan(observed: &Observed) -> (Vec<Step>, Duration) {
    let now = observed.now;
    let mut wait = LONGEST_WAIT;
    let mut until = |at: Timestamp| {
        let left = Duration::try_from(at.duration_since(now)).unwrap_or(Duration::ZERO);
        wait = wait.min(left.max(Duration::from_secs(1)));
    };
    let current = observed.authority.as_deref().and_then(|secret| facts(secret, tls::CERT_KEY));
    let usable =
        observed.authority.as_deref().is_some_and(|secret| authority::has_key(secret, tls::CERT_KEY, tls::KEY_KEY));
    let Some(current) = current.filter(|_| usable) else {
        return (vec![Step::MakeAuthority], wait);
    };
    let next = observed
        .authority
        .as_deref()
        .and_then(|secret| facts(secret, NEXT_CERT_KEY))
        .filter(|facts| facts.is_valid(now));
    let mut steps = Vec::new();

    let published = bundle::text(observed.bundle.as_deref());
    // The former one signs nothing from the promotion on.
    let kept = observed.lives.leaf.saturating_add(SETTLE).saturating_add(CLOCK_SKEW * 2);
    let is_new = now < current.not_before.saturating_add(kept).unwrap_or(now) || next.is_some();
    let wanted = bundle::wanted(published, [Some(&current), next.as_ref()], now, is_new, BUNDLE_LIMIT);
    if published != Some(wanted.as_str()) {
        steps.push(Step::Publish(wanted));
        // An authority signs only after it is known to be in the bundle.
        return (steps, wait);
    }
    match &next {
        None => {
            let renew_at = current.not_after.checked_sub(observed.lives.authority_before).unwrap_or(now);
            let is_other = observed.is_configured && current.surplus(observed.lives.authority).abs() > LIFE_TOLERANCE;
            // A life that changes all the time must push no authority out of the bundle whose certificates are in use.
            let has_room = wanted.matches("BEGIN CERTIFICATE").count() < BUNDLE_LIMIT;
            if now >= renew_at || !current.has_begun(now) || (is_other && has_room) {
                steps.push(Step::StageAuthority);
            } else {
                until(renew_at);
            }
        }
        Some(_) => {
            let since = observed
                .authority
                .as_ref()
                .and_then(|secret| secret.metadata.annotations.as_ref()?.get(NEXT_SINCE)?.parse::<Timestamp>().ok());
            match since.map(|since| since.checked_add(SETTLE).unwrap_or(since)) {
                None => steps.push(Step::MarkPublished),
                // Nothing that the current one signs is accepted.
                Some(settled) if now >= settled || !current.is_valid(now) => steps.push(Step::PromoteAuthority),
                // Recorded by a clock that was ahead.
                Some(settled) if settled.duration_since(now) > SETTLE + CLOCK_SKEW => steps.push(Step::MarkPublished),
                Some(settled) => until(settled),
            }
        }
    }
    if steps.is_empty() {
        for role in Role::ALL {
            let secret = observed.leaves.get(role.secret()).map(Arc::as_ref);
            match leaf::renew_at(secret, role, &current, observed) {
                Some(at) if at > now => until(at),
                _ => steps.push(Step::Issue(role)),
            }
        }
    }
    (steps, wait)
}

fn facts(secret: &Secret, key: &str) -> Option<CertificateFacts> {
    authority::facts(secret.data.as_ref()?.get(key)?.0.as_slice())
}

/// Decides on authority, bundle and leaves.
pub(crate) fn decide(observed: &Observed) -> Result<Decision, CertificateError> {
    let (steps, wait) = plan(observed);
    let mut decision = Decision::settled();
    decision.wake(wait);
    for step in steps {
        tracing::info!(step = step.name(), "certificates change");
        decision.push(perform(observed, &step)?);
    }
    Ok(decision)
}

impl Step {
    fn name(&self) -> &'static str {
        match self {
            Self::MakeAuthority => "make authority",
            Self::StageAuthority => "stage next authority",
            Self::MarkPublished => "mark next authority as published",
            Self::PromoteAuthority => "promote next authority",
            Self::Publish(_) => "publish bundle",
            Self::Issue(role) => role.secret(),
        }
    }
}

/// Changes data and annotations of the authority's Secret.
type ChangeSecret<'a> = dyn Fn(&mut BTreeMap<String, ByteString>, &mut BTreeMap<String, String>) + 'a;

fn perform(observed: &Observed, step: &Step) -> Result<Effect, CertificateError> {
    let secret = |change: &ChangeSecret<'_>| {
        let former = observed.authority.as_deref().cloned().unwrap_or_default();
        let mut data = former.data.unwrap_or_default();
        let mut annotations = former.metadata.annotations.unwrap_or_default();
        change(&mut data, &mut annotations);
        write_secret(&observed.namespace, tls::CA_SECRET, observed.authority.as_deref(), data, annotations)
    };
    match step {
        Step::MakeAuthority => {
            let made = Authority::make(observed.now, observed.lives.authority)?;
            secret(&|data, annotations| {
                data.clear();
                annotations.remove(NEXT_SINCE);
                data.insert(tls::CERT_KEY.to_owned(), ByteString(made.certificate_pem().into_bytes()));
                data.insert(tls::KEY_KEY.to_owned(), ByteString(made.key_pem().into_bytes()));
            })
        }
        Step::StageAuthority => {
            let made = Authority::make(observed.now, observed.lives.authority)?;
            secret(&|data, annotations| {
                annotations.remove(NEXT_SINCE);
                data.insert(NEXT_CERT_KEY.to_owned(), ByteString(made.certificate_pem().into_bytes()));
                data.insert(NEXT_KEY_KEY.to_owned(), ByteString(made.key_pem().into_bytes()));
            })
        }
        Step::MarkPublished => secret(&|_, annotations| {
            annotations.insert(NEXT_SINCE.to_owned(), observed.now.to_string());
        }),
        Step::PromoteAuthority => secret(&|data, annotations| {
            annotations.remove(NEXT_SINCE);
            for (from, to) in [(NEXT_CERT_KEY, tls::CERT_KEY), (NEXT_KEY_KEY, tls::KEY_KEY)] {
                if let Some(value) = data.remove(from) {
                    data.insert(to.to_owned(), value);
                }
            }
        }),
        Step::Publish(text) => bundle::write(&observed.namespace, observed.bundle.as_deref(), text),
        Step::Issue(role) => {
            let authority =
                observed.authority.as_deref().and_then(Authority::from_secret).ok_or(CertificateError::Life)?;
            let (certificate, key) = leaf::issue(*role, &authority, observed)?;
            let former = observed.leaves.get(role.secret()).map(Arc::as_ref);
            let data = BTreeMap::from([
                (tls::CERT_KEY.to_owned(), ByteString(certificate.into_bytes())),
                (tls::KEY_KEY.to_owned(), ByteString(key.into_bytes())),
            ]);
            let annotations = BTreeMap::from([(ISSUER.to_owned(), authority.fingerprint().to_owned())]);
            write_secret(&observed.namespace, role.secret(), former, data, annotations)
        }
    }
}

fn write_secret(
    namespace: &str,
    name: &str,
    former: Option<&Secret>,
    data: BTreeMap<String, ByteString>,
    annotations: BTreeMap<String, String>,
) -> Result<Effect, CertificateError> {
    match former {
        None => {
            let secret = Secret {
                metadata: ObjectMeta {
                    name: Some(name.to_owned()),
                    namespace: Some(namespace.to_owned()),
                    labels: Some(owned_labels()),
                    annotations: Some(annotations),
                    ..ObjectMeta::default()
                },
                type_: Some("Opaque".to_owned()),
                data: Some(data),
                ..Secret::default()
            };
            Effect::create(Kind::Secret, Some(namespace), &secret).map_err(CertificateError::Json)
        }
        Some(former) => {
            let mut wanted = former.clone();
            wanted.data = Some(data);
            let known = wanted.metadata.annotations.get_or_insert_default();
            known.remove(NEXT_SINCE);
            known.extend(annotations);
            let change = Effect::change(Kind::Secret, former, &wanted, None).map_err(CertificateError::Json)?;
            // A step always changes something; an empty patch is not sent.
            Ok(change.unwrap_or_else(|| Effect::merge(Kind::Secret, &former.metadata, serde_json::json!({}))))
        }
    }
}

/// Returns the labels of the objects that this process creates. The chart's uninstallation deletes objects with these labels.
pub(crate) fn owned_labels() -> BTreeMap<String, String> {
    BTreeMap::from([("app.kubernetes.io/managed-by".to_owned(), "virt-controller".to_owned())])
}
