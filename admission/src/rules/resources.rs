//! Memory and CPU amounts.

use api::{VirtualMachineInstanceSpec, quantity, quantity::QuantityError};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::causes::{Causes, Path};

/// Smallest memory anything could run in.
const MEMORY_MIN: i64 = 1_000_000;
/// Largest guest memory: with all that is added to it a sum stays within 64 bits. What no node can hold is for the scheduler
/// to tell.
const MEMORY_MAX: i64 = 4 << 60;

const MALFORMED: &str = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'";

/// An amount that is read.
struct Amount<'a> {
    path: Path<'a>,
    quantity: &'a Quantity,
    value: i64,
}

impl<'a> Amount<'a> {
    fn read(
        path: Path<'a>,
        quantity: Option<&'a Quantity>,
        read: fn(&Quantity) -> Result<i64, QuantityError>,
        causes: &mut Causes,
    ) -> Option<Self> {
        let quantity = quantity?;
        match read(quantity) {
            Ok(value) => Some(Self { path, quantity, value }),
            Err(QuantityError::Malformed(_)) => {
                let message = format!("{path} '{}': {MALFORMED}", quantity.0);
                causes.invalid(path, message);
                None
            }
            Err(QuantityError::OutOfRange(_)) => {
                let message = format!("{path} '{}': is out of range", quantity.0);
                causes.invalid(path, message);
                None
            }
        }
    }

    /// Its text for messages.
    fn text(&self) -> String {
        quantity::canonical(self.quantity)
    }

    fn not_negative(&self, causes: &mut Causes) {
        if self.value < 0 {
            let message = format!("{} '{}': must be greater than or equal to 0.", self.path, self.text());
            causes.invalid(self.path, message);
        }
    }

    fn at_least(&self, least: i64, text: &str, causes: &mut Causes) {
        if self.value < least {
            let message = format!("{} '{}': must be greater than or equal to {text}.", self.path, self.text());
            causes.invalid(self.path, message);
        }
    }
}

/// What is wrong with amounts of memory.
pub(super) fn memory(root: &str, spec: &VirtualMachineInstanceSpec, causes: &mut Causes) {
    let resources = &spec.domain.resources;
    let path = format_args!("{root}.domain.resources.requests.memory");
    let request = Amount::read(path, resources.requests.get("memory"), quantity::units, causes);
    let path = format_args!("{root}.domain.resources.limits.memory");
    let limit = Amount::read(path, resources.limits.get("memory"), quantity::units, causes);
    if let Some(request) = &request {
        request.not_negative(causes);
        if request.value > 0 {
            request.at_least(MEMORY_MIN, "1M", causes);
        }
    }
    if let Some(limit) = &limit {
        limit.not_negative(causes);
        if let Some(request) = request.as_ref().filter(|request| limit.value > 0 && request.value > limit.value) {
            let message =
                format!("{} '{}' is greater than {} '{}'", request.path, request.text(), limit.path, limit.text());
            causes.invalid(request.path, message);
        }
    }

    let given = spec.domain.memory.as_ref();
    huge_pages(root, spec, causes);
    let path = format_args!("{root}.domain.memory.guest");
    let Some(guest) = Amount::read(path, given.and_then(|memory| memory.guest.as_ref()), quantity::units, causes)
    else {
        return;
    };
    // Guest memory that nobody gave is what is requested, or the limit: what is wrong with that has been told.
    let is = |amount: &Option<Amount>| amount.as_ref().is_some_and(|amount| amount.value == guest.value);
    let (requested, limited) = (is(&request), is(&limit));
    let told = (requested && guest.value != 0) || (limited && guest.value < 0);
    if !told {
        guest.at_least(MEMORY_MIN, "1M", causes);
    }
    if guest.value > MEMORY_MAX {
        let message = format!("{} '{}': must be less than or equal to 4Ei.", guest.path, guest.text());
        causes.invalid(guest.path, message);
    }
    if let Some(limit) = limit.filter(|limit| !requested && limit.value > 0 && guest.value > limit.value) {
        let message = format!(
            "{} '{}' must be equal to or less than the memory limit {} '{}'",
            guest.path,
            guest.text(),
            limit.path,
            limit.text()
        );
        causes.invalid(guest.path, message);
    }
}

/// Memory in huge pages is a whole number of them.
fn huge_pages(root: &str, spec: &VirtualMachineInstanceSpec, causes: &mut Causes) {
    let Some(memory) = spec.domain.memory.as_ref() else { return };
    let Some(pages) = memory.hugepages.as_ref() else { return };
    let text = pages.page_size.clone().unwrap_or_default();
    let path = format!("{root}.domain.memory.hugepages.pageSize");
    let page = match quantity::units(&Quantity(text.clone())) {
        Ok(page) if page > 0 => page,
        _ => {
            let message = format!("{path} '{text}': {MALFORMED}");
            causes.invalid(path, message);
            return;
        }
    };
    let resources = &spec.domain.resources;
    let amount = |quantity: Option<&Quantity>| quantity.and_then(|amount| quantity::units(amount).ok()).unwrap_or(0);
    let memory = [resources.requests.get("memory"), memory.guest.as_ref(), resources.limits.get("memory")]
        .into_iter()
        .map(amount)
        .find(|amount| *amount != 0)
        .unwrap_or(0);
    let field = format!("{root}.domain.resources.requests.memory");
    let shown = resources.requests.get("memory").map_or_else(|| "0".to_owned(), quantity::canonical);
    if memory != 0 && memory < page {
        let message = format!("{field} '{shown}' must be equal to or larger than page size {path} '{text}'");
        causes.invalid(field, message);
    } else if memory % page != 0 {
        let message = format!("{field} '{shown}' is not a multiple of the page size {path} '{text}'");
        causes.invalid(field, message);
    }
}

/// What is wrong with amounts of CPU.
pub(super) fn cpu(root: &str, spec: &VirtualMachineInstanceSpec, causes: &mut Causes) {
    let resources = &spec.domain.resources;
    let path = format_args!("{root}.domain.resources.requests.cpu");
    let request = Amount::read(path, resources.requests.get("cpu"), quantity::milli, causes);
    let path = format_args!("{root}.domain.resources.limits.cpu");
    let limit = Amount::read(path, resources.limits.get("cpu"), quantity::milli, causes);
    if let Some(request) = &request {
        request.not_negative(causes);
    }
    if let Some(limit) = &limit {
        limit.not_negative(causes);
    }
    if let (Some(request), Some(limit)) = (request, limit)
        && limit.value > 0
        && request.value > limit.value
    {
        let message =
            format!("{} '{}' is greater than {} '{}'", request.path, request.text(), limit.path, limit.text());
        causes.invalid(request.path, message);
    }
}

/// A machine needs memory from somewhere.
pub fn mandatory_memory(spec: &VirtualMachineInstanceSpec) -> Causes {
    let mut causes = Causes::new();
    let memory = spec.domain.memory.as_ref();
    let requested = spec.domain.resources.requests.get("memory").is_some_and(|amount| quantity::units(amount) != Ok(0));
    let given = memory.is_some_and(|memory| memory.guest.is_some() || memory.hugepages.is_some());
    if !requested && !given {
        causes.required(
            "",
            "no memory requested, at least one of 'spec.domain.memory.guest', 'spec.domain.memory.hugepages.pageSize' or 'spec.domain.resources.requests.memory' must be set",
        );
    }
    causes
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::rules::testing::*;

    fn resources(resources: Value) -> Value {
        json!({"domain": {"resources": resources}})
    }

    #[test]
    fn memory_request_is_positive_and_below_its_limit() {
        let path = "spec.domain.resources.requests.memory";
        accepts(resources(json!({"requests": {"memory": "128Mi"}, "limits": {"memory": "1Gi"}})));
        refuses(
            resources(json!({"requests": {"memory": "-64Mi"}})),
            path,
            "'-64Mi': must be greater than or equal to 0.",
        );
        refuses(resources(json!({"requests": {"memory": "64Ki"}})), path, "must be greater than or equal to 1M.");
        refuses(
            resources(json!({"requests": {"memory": "2048Mi"}, "limits": {"memory": "1Gi"}})),
            path,
            "spec.domain.resources.requests.memory '2Gi' is greater than spec.domain.resources.limits.memory '1Gi'",
        );
        refuses(
            resources(json!({"limits": {"memory": "-1"}})),
            "spec.domain.resources.limits.memory",
            "must be greater than or equal to 0.",
        );
    }

    #[test]
    fn guest_memory_is_possible() {
        let guest = |amount: &str| json!({"domain": {"memory": {"guest": amount}}});
        accepts(guest("64Mi"));
        for (amount, message) in [
            ("0", "must be greater than or equal to 1M."),
            ("-1Gi", "must be greater than or equal to 1M."),
            ("5Ei", "must be less than or equal to 4Ei."),
            ("900000Ei", "is out of range"),
            ("much", "quantities must match"),
        ] {
            refuses(guest(amount), "spec.domain.memory.guest", message);
        }
    }

    #[test]
    fn guest_memory_that_follows_a_wrong_amount_is_not_told_again() {
        let same = |amount: &str, resources: Value| {
            let machine = machine(json!({"domain": {"memory": {"guest": amount}, "resources": resources}}));
            let mut causes = Causes::new();
            memory("spec", &machine, &mut causes);
            causes.as_slice().iter().map(|cause| cause.field.clone()).collect::<Vec<_>>()
        };
        let request = "spec.domain.resources.requests.memory";
        assert_eq!(same("-64Mi", json!({"requests": {"memory": "-64Mi"}})), [request]);
        assert_eq!(same("64Ki", json!({"requests": {"memory": "64Ki"}})), [request]);
        assert_eq!(same("2Gi", json!({"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}})), [request]);
        assert_eq!(same("-1", json!({"limits": {"memory": "-1"}})), ["spec.domain.resources.limits.memory"]);
        assert_eq!(same("64Ki", json!({"limits": {"memory": "64Ki"}})), ["spec.domain.memory.guest"]);
    }

    #[test]
    fn guest_memory_is_within_the_limit() {
        let with_limit = |limit: &str| resources(json!({"limits": {"memory": limit}}));
        accepts(with_limit("128Mi"));
        refuses(with_limit("64Mi"), "spec.domain.memory.guest", "must be equal to or less than the memory limit");
    }

    #[test]
    fn cpu_request_is_positive_and_below_its_limit() {
        accepts(resources(json!({"requests": {"cpu": "500m"}, "limits": {"cpu": 1}})));
        refuses(
            resources(json!({"requests": {"cpu": "-1"}})),
            "spec.domain.resources.requests.cpu",
            "must be greater than or equal to 0.",
        );
        refuses(
            resources(json!({"limits": {"cpu": "-1"}})),
            "spec.domain.resources.limits.cpu",
            "must be greater than or equal to 0.",
        );
        refuses(
            resources(json!({"requests": {"cpu": "2"}, "limits": {"cpu": "1500m"}})),
            "spec.domain.resources.requests.cpu",
            "'2' is greater than spec.domain.resources.limits.cpu '1500m'",
        );
    }

    #[test]
    fn machine_without_memory_is_refused() {
        assert!(mandatory_memory(&machine(json!({}))).is_empty());
        assert!(!mandatory_memory(&VirtualMachineInstanceSpec::default()).is_empty());
    }
}
