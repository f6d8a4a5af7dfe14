//! Packs the relocations of the programs: half a megabyte that every worker reads at its start becomes ten kilobytes.
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
}
