//! Compiles the used APIs of kubelet and that of guests with protox, so that no `protoc` is needed.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files =
        protox::compile(["proto/deviceplugin.proto", "proto/podresources.proto", "proto/vsock.proto"], ["proto"])?;
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
