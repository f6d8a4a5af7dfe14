//! Authentication and authorization of requests to the aggregated API.
//!
//! - [`front_proxy`]: follows the trust in kube-apiserver's client certificate; [`authentication`]: extracts the user.
//! - [`authorization`]: SubjectAccessReview for each request, with a short cache.

pub(crate) mod authentication;
pub(crate) mod authorization;
pub(crate) mod front_proxy;
