//! `expand-vm-spec`: the VM in the request with its instance type and preference applied.

use api::VirtualMachine;
use axum::{body::Body, response::Response};
use http::{Request, StatusCode};
use serde_json::Value;

use super::common::{
    call::Call,
    expansion, schema,
    specification::{Answer, Content, Specification},
};
use crate::{
    limits::memory::values,
    requests::error::{ApiError, json_response},
};

pub(super) static SPECIFICATION: Specification = Specification {
    options: Some(schema::vm),
    content: Content::Json,
    operation: "ExpandSpec",
    description: "Apply instance type and preference to the VirtualMachine that is sent along",
    ..Specification::put("expand-vm-spec", "", Answer::Document(schema::vm), |call, request| {
        Box::pin(serve(call, request))
    })
};

/// Largest VM: that of etcd.
const MAX_VM: usize = 3 << 19;
/// Most values of a VM; see the webhooks.
const MAX_VALUES: usize = 8 << 10;

async fn serve(call: Call<'_>, request: Request<Body>) -> Result<Response, ApiError> {
    let mut body = call.context.bodies.read(request.into_body(), MAX_VM).await?;
    call.context.bodies.count_values(&mut body)?;
    let vm = decide(&body.bytes, &call.object.namespace)?;
    let expanded = expansion::expanded(call, &vm).await.map_err(|error| ApiError::BadRequest(error.to_string()))?;
    Ok(body.answer(json_response(StatusCode::OK, &expanded)))
}

/// Parses a VM for `namespace`, with the structural checks of admission.
fn decide(body: &[u8], namespace: &str) -> Result<VirtualMachine, ApiError> {
    if values(body) > MAX_VALUES {
        return Err(ApiError::BadRequest(format!("a VM has at most {MAX_VALUES} values")));
    }
    let raw: Value = serde_json::from_slice(body)
        .map_err(|error| ApiError::BadRequest(format!("Can not unmarshal Request body to struct, error: {error}")))?;
    let mut vm: VirtualMachine = admission::decode::object(&raw).map_err(|errors| ApiError::Invalid {
        message: "Object is not a valid VirtualMachine".to_owned(),
        causes: errors.as_slice().iter().map(|error| error.message.clone()).collect(),
    })?;
    match vm.metadata.namespace.as_deref() {
        None | Some("") => {}
        Some(own) if own == namespace => {}
        Some(_) => return Err(ApiError::BadRequest(format!("VM namespace must be empty or {namespace}"))),
    }
    // The namespace of instance types and preferences.
    vm.metadata.namespace = Some(namespace.to_owned());
    Ok(vm)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn vm(namespace: &str, spec: Value) -> Vec<u8> {
        let vm = json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine",
            "metadata": {"name": "vm", "namespace": namespace}, "spec": spec,
        });
        vm.to_string().into_bytes()
    }

    fn spec() -> Value {
        json!({"runStrategy": "Halted", "template": {"spec": {"domain": {"devices": {}}}}})
    }

    #[test]
    fn vm_is_parsed_as_strictly_as_by_admission() {
        assert_eq!(decide(&vm("", spec()), "ns").unwrap().metadata.namespace.as_deref(), Some("ns"));
        assert_eq!(decide(&vm("ns", spec()), "ns").unwrap().metadata.namespace.as_deref(), Some("ns"));
        assert_eq!(
            decide(&vm("other", spec()), "ns").err(),
            Some(ApiError::BadRequest("VM namespace must be empty or ns".into()))
        );
        let Err(ApiError::BadRequest(message)) = decide(b"{", "ns") else { panic!("accepted") };
        assert!(message.starts_with("Can not unmarshal Request body to struct, error: "), "{message}");
        let mut wrong = spec();
        wrong["template"]["spec"]["unknown"] = json!(1);
        let Err(ApiError::Invalid { message, causes }) = decide(&vm("", wrong), "ns") else { panic!("accepted") };
        assert_eq!(message, "Object is not a valid VirtualMachine");
        assert!(causes[0].contains("spec.template.spec.unknown"), "{causes:?}");
    }
}
