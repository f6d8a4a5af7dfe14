//! Requests that the local server answers.

use http::{Method, StatusCode};

use crate::target::{is_label, object_name};

/// A VM or VMI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub namespace: String,
    pub name: String,
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Route<'a> {
    /// A file of the pages.
    File(&'a str),
    /// The list and its changes, by a WebSocket.
    Watch,
    /// The serial console or the display of a VMI, by a WebSocket: the name of the subresource.
    Stream(Named, &'static str),
    /// An action: its resource and its subresource.
    Act(Named, &'static str, &'static str),
}

/// Actions with the resource that has the subresource of this name.
const ACTIONS: [(&str, &str); 6] = [
    ("start", "virtualmachines"),
    ("stop", "virtualmachines"),
    ("restart", "virtualmachines"),
    ("migrate", "virtualmachines"),
    ("pause", "virtualmachineinstances"),
    ("unpause", "virtualmachineinstances"),
];
/// Streams with their subresource.
const STREAMS: [(&str, &str); 2] = [("console", "console?replay=true"), ("display", "vnc")];

/// Finds the request of a path below the token.
pub(super) fn parse<'a>(method: &Method, path: &'a str) -> Result<Route<'a>, StatusCode> {
    let route = match path.split('/').collect::<Vec<_>>().as_slice() {
        ["watch"] => Route::Watch,
        ["vms", namespace, name, word] if is_label(namespace) && object_name(name).is_ok() => {
            let named = Named { namespace: (*namespace).to_owned(), name: (*name).to_owned() };
            if let Some((action, resource)) = ACTIONS.iter().find(|(action, _)| action == word) {
                Route::Act(named, resource, action)
            } else if let Some((_, subresource)) = STREAMS.iter().find(|(stream, _)| stream == word) {
                Route::Stream(named, subresource)
            } else {
                return Err(StatusCode::NOT_FOUND);
            }
        }
        [""] => Route::File("index.html"),
        _ => Route::File(path),
    };
    let expected = if matches!(route, Route::Act(..)) { Method::POST } else { Method::GET };
    if *method == expected { Ok(route) } else { Err(StatusCode::METHOD_NOT_ALLOWED) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_select_files_streams_and_actions() {
        let box_ = || Named { namespace: "a".into(), name: "box.1".into() };
        for (method, path, expected) in [
            (Method::GET, "", Ok(Route::File("index.html"))),
            (Method::GET, "novnc/core/rfb.js", Ok(Route::File("novnc/core/rfb.js"))),
            (Method::GET, "watch", Ok(Route::Watch)),
            (Method::GET, "vms/a/box.1/console", Ok(Route::Stream(box_(), "console?replay=true"))),
            (Method::GET, "vms/a/box.1/display", Ok(Route::Stream(box_(), "vnc"))),
            (Method::POST, "vms/a/box.1/stop", Ok(Route::Act(box_(), "virtualmachines", "stop"))),
            (Method::POST, "vms/a/box.1/pause", Ok(Route::Act(box_(), "virtualmachineinstances", "pause"))),
            (Method::GET, "vms/a/box.1/stop", Err(StatusCode::METHOD_NOT_ALLOWED)),
            (Method::POST, "watch", Err(StatusCode::METHOD_NOT_ALLOWED)),
            (Method::DELETE, "", Err(StatusCode::METHOD_NOT_ALLOWED)),
            (Method::GET, "vms/a/box.1/portforward", Err(StatusCode::NOT_FOUND)),
            // Names become parts of paths of the API server; other texts are names of files that do not exist.
            (Method::POST, "vms/a/vm%2Fbox/stop", Err(StatusCode::METHOD_NOT_ALLOWED)),
            (Method::POST, "vms/A/box/stop", Err(StatusCode::METHOD_NOT_ALLOWED)),
            (Method::POST, "vms/a/../stop", Err(StatusCode::METHOD_NOT_ALLOWED)),
            (Method::POST, "vms/../box/stop", Err(StatusCode::METHOD_NOT_ALLOWED)),
            (Method::GET, "vms/a/b?c/console", Ok(Route::File("vms/a/b?c/console"))),
        ] {
            assert_eq!(parse(&method, path), expected, "{method} {path}");
        }
    }
}
