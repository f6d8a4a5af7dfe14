//! Compiles kubelet's API of device plugins with protox, so that no `protoc` is needed.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = "../../node/proto";
    println!("cargo::rerun-if-changed={folder}/deviceplugin.proto");
    let files = protox::compile(["deviceplugin.proto"], [folder])?;
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
