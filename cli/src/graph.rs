//! `objectgraph`: prints the objects that a VM or VMI depends on.

use clap::Args;
use http::Method;
use serde_json::{Value, json};

use crate::{
    Connection, Error,
    guest::{Document, read},
    lifecycle::labels,
    object_name, print,
};

/// Options of `objectgraph`.
#[derive(Args)]
pub(crate) struct GraphOptions {
    /// Name of the VirtualMachine
    #[arg(value_name = "VM")]
    vm: String,
    /// Print the graph of the VirtualMachineInstance instead
    #[arg(long)]
    vmi: bool,
    /// Leave out optional dependencies
    #[arg(long)]
    exclude_optional: bool,
    /// Include only objects with these labels
    #[arg(long, value_name = "LABEL=VALUE,...", value_delimiter = ',')]
    selector: Vec<String>,
    /// Output format
    #[arg(long, short, value_enum, default_value_t = Document::Json)]
    output: Document,
}

fn request(options: &GraphOptions) -> Result<Value, Error> {
    let mut request = json!({"includeOptionalNodes": !options.exclude_optional});
    if let Some(labels) = labels(&options.selector)? {
        request["labelSelector"] = json!({"matchLabels": labels});
    }
    Ok(request)
}

pub(crate) async fn run(connection: &Connection, options: &GraphOptions) -> Result<(), Error> {
    let name = object_name(&options.vm)?;
    let resource = if options.vmi { "virtualmachineinstances" } else { "virtualmachines" };
    let body = request(options)?.to_string().into_bytes();
    let answer = connection.call(Method::GET, &connection.path(resource, name, "objectgraph"), body).await?;
    print(format_args!("{}", options.output.rendered(&read(&answer)?)?))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::command_line::{Cli, Command};

    #[test]
    fn optional_objects_are_in_the_graph_unless_excluded() {
        let made = |words: &[&str]| {
            let cli = Cli::parse_from([&["kubectl-virt", "objectgraph", "vm"], words].concat());
            let Command::ObjectGraph(options) = cli.command else { panic!("another command") };
            request(&options).unwrap()
        };
        assert_eq!(made(&[]), json!({"includeOptionalNodes": true}));
        assert_eq!(
            made(&["--vmi", "--exclude-optional", "--selector=a=b,c=d"]),
            json!({"includeOptionalNodes": false, "labelSelector": {"matchLabels": {"a": "b", "c": "d"}}})
        );
    }
}
