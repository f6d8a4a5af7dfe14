//! `version`: versions and commits of the client and of the server.

use clap::Args;
use http::Method;
use serde_json::{Value, json};

use crate::{
    Connection, Error,
    guest::{Document, read},
    print,
};

/// Options of `version`.
#[derive(Args)]
pub(crate) struct VersionOptions {
    /// Print only the version of the client
    #[arg(long, short)]
    pub client: bool,
    /// Output format; default: one line for each version
    #[arg(long, short, value_enum)]
    output: Option<Document>,
}

/// Returns the version of this program. The build sets the commit in variables (`Makefile`).
fn client() -> Value {
    json!({
        "gitVersion": concat!("v", env!("CARGO_PKG_VERSION")),
        "gitCommit": option_env!("FERROVIRT_GIT_COMMIT").unwrap_or_default(),
        "gitTreeState": option_env!("FERROVIRT_GIT_TREE_STATE").unwrap_or_default(),
    })
}

/// Prints the versions. Without a connection, that of the client alone.
pub(crate) async fn run(connection: Option<Result<Connection, Error>>, options: &VersionOptions) -> Result<(), Error> {
    let mut versions = vec![("client", client())];
    let mut failure = None;
    if let Some(connection) = connection {
        match server(connection).await {
            Ok(server) => versions.push(("server", server)),
            // A server that does not answer must not hide the version of the client.
            Err(error) => failure = Some(error),
        }
    }
    print(format_args!("{}", rendered(&versions, options.output)?))?;
    failure.map_or(Ok(()), Err)
}

/// Reads the version of the server.
async fn server(connection: Result<Connection, Error>) -> Result<Value, Error> {
    read(&connection?.call(Method::GET, "/apis/subresources.kubevirt.io/v1/version", Vec::new()).await?)
}

/// Renders versions by their roles.
fn rendered(versions: &[(&str, Value)], output: Option<Document>) -> Result<String, Error> {
    match output {
        Some(format) => {
            let entries = versions.iter().map(|(role, version)| (format!("{role}Version"), version.clone()));
            format.rendered(&Value::Object(entries.collect()))
        }
        None => Ok(versions.iter().map(|(role, version)| line(role, version)).collect()),
    }
}

/// Returns a version as a line, with its commit if that is known.
fn line(role: &str, version: &Value) -> String {
    let field = |name: &str| version[name].as_str().filter(|text| !text.is_empty());
    let number = field("gitVersion").unwrap_or("unknown");
    let state = field("gitTreeState").filter(|state| *state != "clean").map(|state| format!(", {state}"));
    let commit = field("gitCommit").map(|commit| format!(" (commit {commit}{})", state.unwrap_or_default()));
    let role = if role == "client" { "Client" } else { "Server" };
    format!("{role} Version: {number}{}\n", commit.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_lines_with_their_commits() {
        for (version, expected) in [
            (json!({"gitVersion": "v1.2.3", "gitCommit": ""}), "Client Version: v1.2.3\n"),
            (
                json!({"gitVersion": "v1.2.3", "gitCommit": "abc", "gitTreeState": "clean"}),
                "Client Version: v1.2.3 (commit abc)\n",
            ),
            (
                json!({"gitVersion": "v1.2.3", "gitCommit": "abc", "gitTreeState": "dirty"}),
                "Client Version: v1.2.3 (commit abc, dirty)\n",
            ),
            (json!({}), "Client Version: unknown\n"),
        ] {
            assert_eq!(rendered(&[("client", version)], None).unwrap(), expected);
        }
        assert!(line("client", &client()).starts_with(concat!("Client Version: v", env!("CARGO_PKG_VERSION"))));
    }

    #[test]
    fn documents_have_an_entry_for_each_role() {
        let versions = [("client", json!({"gitVersion": "v1"})), ("server", json!({"gitVersion": "v2"}))];
        assert_eq!(
            rendered(&versions, Some(Document::Yaml)).unwrap(),
            "clientVersion:\n  gitVersion: v1\nserverVersion:\n  gitVersion: v2\n"
        );
        let document = read(rendered(&versions[..1], Some(Document::Json)).unwrap().as_bytes()).unwrap();
        assert_eq!(document, json!({"clientVersion": {"gitVersion": "v1"}}));
    }
}
