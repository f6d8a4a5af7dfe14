//! Compiles the protocol with protox, which replaces `protoc`, and implements `Unary` for the requests of its calls.

use std::{fmt::Write, path::Path};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(["proto/launcher.proto"], ["proto"])?;
    let mut calls = String::new();
    for call in files.file.iter().flat_map(|file| &file.service).flat_map(|service| &service.method) {
        if call.client_streaming() || call.server_streaming() {
            continue;
        }
        let [request, reply] = [call.input_type(), call.output_type()].map(|name| name.rsplit('.').next());
        let (request, reply, name) = (request.unwrap_or_default(), reply.unwrap_or_default(), call.name());
        let method = name.char_indices().fold(String::new(), |method, (at, letter)| {
            let gap = if at > 0 && letter.is_uppercase() { "_" } else { "" };
            method + gap + &letter.to_lowercase().to_string()
        });
        writeln!(
            calls,
            "impl Unary for {request} {{
                type Reply = {reply};
                const NAME: &'static str = \"{name}\";
                async fn send(client: &mut Client, request: Request<Self>) -> Result<Response<{reply}>, Status> {{
                    client.{method}(request).await
                }}
            }}"
        )?;
    }
    std::fs::write(Path::new(&std::env::var("OUT_DIR")?).join("calls.rs"), calls)?;
    tonic_prost_build::configure().codec_path("crate::codec::SmallBuffers").compile_fds(files)?;
    Ok(())
}
