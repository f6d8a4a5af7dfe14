//! Semantic equality: `1Gi` equals `1024Mi`.

use api::quantity;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::Serialize;
use serde_json::Value;

/// Returns true if two objects are semantically equal.
pub(crate) fn equal<T: Serialize>(one: &T, two: &T) -> bool {
    match (serde_json::to_value(one), serde_json::to_value(two)) {
        (Ok(one), Ok(two)) => values(&one, &two, false),
        _ => false,
    }
}

fn values(one: &Value, two: &Value, amounts: bool) -> bool {
    match (one, two) {
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len()
                && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| values(a, b, amounts || is_amount(key))))
        }
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| values(a, b, amounts)),
        (Value::String(a), Value::String(b)) if amounts && a != b => {
            let (a, b) = (Quantity(a.clone()), Quantity(b.clone()));
            match (quantity::milli(&a), quantity::milli(&b)) {
                (Ok(a), Ok(b)) => a == b,
                _ => matches!((quantity::units(&a), quantity::units(&b)), (Ok(a), Ok(b)) if a == b),
            }
        }
        _ => one == two,
    }
}

fn is_amount(key: &str) -> bool {
    ["guest", "maxGuest", "addedOverhead", "capacity", "requests", "limits"].contains(&key)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn amounts_compare_by_value_and_other_texts_exactly() {
        let one = json!({"memory": {"guest": "1Gi"}, "resources": {"requests": {"cpu": "1000m"}}, "image": "1Gi"});
        let two = json!({"memory": {"guest": "1024Mi"}, "resources": {"requests": {"cpu": "1"}}, "image": "1Gi"});
        assert!(equal(&one, &two));
        let three = json!({"memory": {"guest": "1Gi"}, "resources": {"requests": {"cpu": "1"}}, "image": "1024Mi"});
        assert!(!equal(&one, &three));
    }
}
