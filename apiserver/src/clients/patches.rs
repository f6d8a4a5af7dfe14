//! JSON patches in the spelling that the API server compares.

use json_patch::Patch;
use kube::{
    Api, Resource,
    api::{self as kube_api, PatchParams},
};

/// Sends a JSON patch of an object, or of its subresource.
///
/// # Errors
/// Those of the request; status 422 if a test of the patch fails.
pub(crate) async fn send<K: Resource>(
    api: Api<K>,
    subresource: Option<&str>,
    name: &str,
    params: &PatchParams,
    patch: Patch,
) -> kube::Result<()> {
    let request = kube::core::Request::new(api.resource_url());
    let patch = kube_api::Patch::Json::<()>(patch);
    let request = match subresource {
        None => request.patch(name, params, &patch),
        Some(subresource) => request.patch_subresource(subresource, name, params, &patch),
    };
    let request = request.map_err(kube::Error::BuildRequest)?.map(|body| escaped(&body));
    api.into_client().request_text(request).await.map(drop)
}

/// Escapes what Go's JSON encoder escapes within texts. The API server compares the value of a test byte by byte with an object that
/// this encoder wrote (evanphx/json-patch 4.13), so that `&` and `\u0026` differ. JSON has these characters within texts only.
pub(crate) fn escaped(json: &[u8]) -> Vec<u8> {
    let json = String::from_utf8_lossy(json);
    let mut escaped = String::with_capacity(json.len());
    for character in json.chars() {
        match character {
            '&' => escaped.push_str(r"\u0026"),
            '<' => escaped.push_str(r"\u003c"),
            '>' => escaped.push_str(r"\u003e"),
            '\u{2028}' => escaped.push_str(r"\u2028"),
            '\u{2029}' => escaped.push_str(r"\u2029"),
            other => escaped.push(other),
        }
    }
    escaped.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_escaped_as_by_go() {
        let patch = json_patch::Patch(vec![json_patch::PatchOperation::Test(json_patch::TestOperation {
            path: json_patch::jsonptr::PointerBuf::from_tokens(["data"]),
            value: serde_json::json!({"script": "a && b <c> \u{2028}\u{2029}\u{202A} é\n\"\\"}),
        })]);
        let written = escaped(&serde_json::to_vec(&patch).unwrap());
        let expected = r#"[{"op":"test","path":"/data","value":{"script":"a \u0026\u0026 b \u003cc\u003e \u2028\u2029"#;
        let expected = format!("{expected}\u{202A} é{}", r#"\n\"\\"}}]"#);
        assert_eq!(String::from_utf8(written).unwrap(), expected);
    }
}
