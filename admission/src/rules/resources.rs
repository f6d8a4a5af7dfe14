//! Amounts of memory and CPU.

use api::{VirtualMachineInstanceSpec, quantity, quantity::QuantityError};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::context::{FieldErrors, PathText};

/// Smallest guest memory.
const MEMORY_MIN: i64 = 1_000_000;
/// Largest number of bytes that is rather a number of mebibytes.
const COUNT_MAX: i64 = 1 << 18;
/// Largest guest memory: sums with overhead stay within 64 bits. The scheduler rejects what no node can run.
const MEMORY_MAX: i64 = 4 << 60;

const MALFORMED: &str = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'";

/// A parsed amount.
struct Amount<'a> {
    path: PathText<'a>,
    quantity: &'a Quantity,
    value: i64,
}

impl<'a> Amount<'a> {
    fn read(
        path: PathText<'a>,
        quantity: Option<&'a Quantity>,
        read: fn(&Quantity) -> Result<i64, QuantityError>,
        errors: &mut FieldErrors,
    ) -> Option<Self> {
        let quantity = quantity?;
        match read(quantity) {
            Ok(value) => Some(Self { path, quantity, value }),
            Err(QuantityError::Malformed(_)) => {
                errors.invalid(path, malformed(path, &quantity.0));
                None
            }
            Err(QuantityError::OutOfRange(_)) => {
                let message = format!("{path} '{}': is out of range", quantity.0);
                errors.invalid(path, message);
                None
            }
        }
    }

    /// Returns its text for messages.
    fn text(&self) -> String {
        quantity::canonical(self.quantity)
    }

    fn not_negative(&self, errors: &mut FieldErrors) {
        if self.value < 0 {
            let message = format!("{} '{}': must be greater than or equal to 0.", self.path, self.text());
            errors.invalid(self.path, message);
        }
    }

    fn at_least(&self, least: i64, text: &str, errors: &mut FieldErrors) {
        if self.value < least {
            let message = format!("{} '{}': must be greater than or equal to {text}.", self.path, self.text());
            errors.invalid(self.path, format!("{message}{}", self.hint()));
        }
    }

    /// Returns a sentence about a missing unit, or one that is likely a mistake.
    fn hint(&self) -> String {
        let text = self.quantity.0.as_str();
        let what = match text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.') {
            "" => "A number without a unit counts bytes",
            "m" => "The unit m is a thousandth",
            _ => return String::new(),
        };
        quantity::suggested(text)
            .filter(|_| (1..=COUNT_MAX).contains(&self.value))
            .map_or_else(String::new, |better| format!(" {what}: write {better}."))
    }
}

/// Returns the message about a text that is no amount, with the unit that it may lack.
fn malformed(path: PathText<'_>, text: &str) -> String {
    let hint = quantity::suggested(text).map(|better| format!(": write {better}")).unwrap_or_default();
    format!("{path} '{text}': {MALFORMED}{hint}")
}

/// Returns errors for amounts of a spec that are none. The schema of the API server refuses them as well, but later and
/// without their units.
pub(crate) fn validate_amounts(root: &str, spec: &VirtualMachineInstanceSpec) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let (memory, resources) = (spec.domain.memory.as_ref(), &spec.domain.resources);
    let guest = memory.and_then(|memory| memory.guest.as_ref()).map(|amount| ("memory.guest".to_owned(), amount));
    let most = memory.and_then(|memory| memory.max_guest.as_ref()).map(|amount| ("memory.maxGuest".to_owned(), amount));
    let requests = resources.requests.iter().map(|(name, amount)| (format!("resources.requests.{name}"), amount));
    let limits = resources.limits.iter().map(|(name, amount)| (format!("resources.limits.{name}"), amount));
    for (field, amount) in guest.into_iter().chain(most).chain(requests).chain(limits) {
        if let Err(QuantityError::Malformed(_)) = quantity::units(amount) {
            let path = format_args!("{root}.domain.{field}");
            errors.invalid(path, malformed(path, &amount.0));
        }
    }
    errors
}

/// Validates amounts of memory.
pub(super) fn validate_memory(root: &str, spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    let resources = &spec.domain.resources;
    let path = format_args!("{root}.domain.resources.requests.memory");
    let request = Amount::read(path, resources.requests.get("memory"), quantity::units, errors);
    let path = format_args!("{root}.domain.resources.limits.memory");
    let limit = Amount::read(path, resources.limits.get("memory"), quantity::units, errors);
    if let Some(request) = &request {
        request.not_negative(errors);
        if request.value > 0 {
            request.at_least(MEMORY_MIN, "1M", errors);
        }
    }
    if let Some(limit) = &limit {
        limit.not_negative(errors);
        if let Some(request) = request.as_ref().filter(|request| limit.value > 0 && request.value > limit.value) {
            let message =
                format!("{} '{}' is greater than {} '{}'", request.path, request.text(), limit.path, limit.text());
            errors.invalid(request.path, message);
        }
    }

    let memory = spec.domain.memory.as_ref();
    validate_huge_pages(root, spec, errors);
    let path = format_args!("{root}.domain.memory.guest");
    let Some(guest) = Amount::read(path, memory.and_then(|memory| memory.guest.as_ref()), quantity::units, errors)
    else {
        return;
    };
    // Guest memory that was copied from request or limit by defaults has no errors of its own.
    let is = |amount: &Option<Amount>| amount.as_ref().is_some_and(|amount| amount.value == guest.value);
    let (requested, limited) = (is(&request), is(&limit));
    let reported = (requested && guest.value != 0) || (limited && guest.value < 0);
    if !reported {
        guest.at_least(MEMORY_MIN, "1M", errors);
    }
    if guest.value > MEMORY_MAX {
        let message = format!("{} '{}': must be less than or equal to 4Ei.", guest.path, guest.text());
        errors.invalid(guest.path, message);
    }
    if let Some(limit) = limit.filter(|limit| !requested && limit.value > 0 && guest.value > limit.value) {
        let message = format!(
            "{} '{}' must be equal to or less than the memory limit {} '{}'",
            guest.path,
            guest.text(),
            limit.path,
            limit.text()
        );
        errors.invalid(guest.path, message);
    }
}

/// Validates that guest memory is a multiple of the huge page size.
fn validate_huge_pages(root: &str, spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    let Some(memory) = spec.domain.memory.as_ref() else { return };
    let Some(pages) = memory.hugepages.as_ref() else { return };
    let text = pages.page_size.clone().unwrap_or_default();
    let path = format!("{root}.domain.memory.hugepages.pageSize");
    let page = match quantity::units(&Quantity(text.clone())) {
        Ok(page) if page > 0 => page,
        _ => {
            let message = format!("{path} '{text}': {MALFORMED}");
            errors.invalid(path, message);
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
        errors.invalid(field, message);
    } else if memory % page != 0 {
        let message = format!("{field} '{shown}' is not a multiple of the page size {path} '{text}'");
        errors.invalid(field, message);
    }
}

/// Validates amounts of CPU.
pub(super) fn validate_cpu(root: &str, spec: &VirtualMachineInstanceSpec, errors: &mut FieldErrors) {
    let resources = &spec.domain.resources;
    let path = format_args!("{root}.domain.resources.requests.cpu");
    let request = Amount::read(path, resources.requests.get("cpu"), quantity::milli, errors);
    let path = format_args!("{root}.domain.resources.limits.cpu");
    let limit = Amount::read(path, resources.limits.get("cpu"), quantity::milli, errors);
    if let Some(request) = &request {
        request.not_negative(errors);
    }
    if let Some(limit) = &limit {
        limit.not_negative(errors);
    }
    if let (Some(request), Some(limit)) = (request, limit)
        && limit.value > 0
        && request.value > limit.value
    {
        let message =
            format!("{} '{}' is greater than {} '{}'", request.path, request.text(), limit.path, limit.text());
        errors.invalid(request.path, message);
    }
}

/// Returns a warning about a template without memory, whose VMIs are refused.
pub(crate) fn memory_warning(root: &str, spec: &VirtualMachineInstanceSpec) -> Option<String> {
    (!validate_mandatory_memory(spec).is_empty())
        .then(|| format!("{root}.domain.memory: no memory requested, so no VMI can start: set memory.guest"))
}

/// Returns an error if a VMI has no memory.
pub(crate) fn validate_mandatory_memory(spec: &VirtualMachineInstanceSpec) -> FieldErrors {
    let mut errors = FieldErrors::new();
    let memory = spec.domain.memory.as_ref();
    let requested = spec.domain.resources.requests.get("memory").is_some_and(|amount| quantity::units(amount) != Ok(0));
    let has_guest_memory = memory.is_some_and(|memory| memory.guest.is_some() || memory.hugepages.is_some());
    if !requested && !has_guest_memory {
        errors.required(
            "spec.domain.memory",
            "no memory requested, at least one of 'spec.domain.memory.guest', 'spec.domain.memory.hugepages.pageSize' or 'spec.domain.resources.requests.memory' must be set",
        );
    }
    errors
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
    fn guest_memory_copied_from_an_invalid_amount_is_reported_once() {
        let same = |amount: &str, resources: Value| {
            let vmi = vmi_spec(json!({"domain": {"memory": {"guest": amount}, "resources": resources}}));
            let mut errors = FieldErrors::new();
            validate_memory("spec", &vmi, &mut errors);
            errors.as_slice().iter().map(|error| error.field.clone()).collect::<Vec<_>>()
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
    fn vmi_without_memory_is_refused() {
        assert!(validate_mandatory_memory(&vmi_spec(json!({}))).is_empty());
        assert!(!validate_mandatory_memory(&VirtualMachineInstanceSpec::default()).is_empty());
    }
}
