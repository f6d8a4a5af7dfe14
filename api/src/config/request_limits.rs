//! Limits of requests of the components to the API server.

use super::ClusterConfig;
use crate::{
    constants::component,
    kubevirt::configuration::{KubeVirtConfiguration, ReloadableComponentConfiguration},
};

/// Limit of a component's requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RequestLimit {
    /// Requests per second.
    pub qps: f64,
    /// Requests that may be sent at once after a pause.
    pub burst: f64,
}

/// Limits by component; `None`: no limit.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestLimits {
    /// Limit of virt-api.
    pub api: Option<RequestLimit>,
    /// Limit of virt-controller.
    pub controller: Option<RequestLimit>,
    /// Limit of virt-handler.
    pub handler: Option<RequestLimit>,
}

impl RequestLimits {
    /// Reads the limits of a KubeVirt object.
    pub(super) fn read(from: &KubeVirtConfiguration) -> Self {
        Self {
            api: limit(from.api_configuration.as_ref()),
            controller: limit(from.controller_configuration.as_ref()),
            handler: limit(from.handler_configuration.as_ref()),
        }
    }
}

/// Returns the limit of a component. One that would let no request through is none.
fn limit(from: Option<&ReloadableComponentConfiguration>) -> Option<RequestLimit> {
    let bucket = from?.rest_client.as_ref()?.rate_limiter.as_ref()?.token_bucket_rate_limiter.as_ref()?;
    (bucket.qps > 0.0).then(|| RequestLimit { qps: bucket.qps, burst: f64::from(bucket.burst.max(1)) })
}

impl ClusterConfig {
    /// Returns the limit of a component (see [`component`]).
    pub fn request_limit(&self, name: &str) -> Option<RequestLimit> {
        match name {
            component::VIRT_API => self.request_limits.api,
            component::VIRT_CONTROLLER => self.request_limits.controller,
            component::VIRT_HANDLER => self.request_limits.handler,
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_component_has_its_own_limit() {
        let bucket = |qps: f64, burst: i32| json!({"restClient": {"rateLimiter": {"tokenBucketRateLimiter": {"qps": qps, "burst": burst}}}});
        let from = json!({
            "apiConfiguration": bucket(5.0, 10), "controllerConfiguration": bucket(0.5, 0), "handlerConfiguration": bucket(-1.0, 1),
        });
        let config = ClusterConfig {
            request_limits: RequestLimits::read(&serde_json::from_value(from).unwrap()),
            ..ClusterConfig::default()
        };
        for (name, expected) in [
            (component::VIRT_API, Some(RequestLimit { qps: 5.0, burst: 10.0 })),
            (component::VIRT_CONTROLLER, Some(RequestLimit { qps: 0.5, burst: 1.0 })),
            (component::VIRT_HANDLER, None),
            (component::VIRT_LAUNCHER, None),
        ] {
            assert_eq!(config.request_limit(name), expected, "{name}");
        }
        assert_eq!(RequestLimits::read(&KubeVirtConfiguration::default()), RequestLimits::default());
    }
}
