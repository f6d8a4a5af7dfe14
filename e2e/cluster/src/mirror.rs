//! A registry on the host as the source of the product's images, for nodes that lack them.

use std::path::PathBuf;

use crate::{
    error::{FileContext, Result},
    plan::{Node, Plan},
    render,
};

/// Makes a node pull the images of a registry with this name from the registry on the host.
///
/// # Errors
/// Fails if the setting cannot be written.
pub fn add(plan: &Plan, node: &Node, name: &str) -> Result<()> {
    let folder = folder(node, name);
    std::fs::create_dir_all(&folder).at("create", &folder)?;
    let file = folder.join("hosts.toml");
    std::fs::write(&file, render::node::registry(plan)).at("write", &file)
}

/// Removes the setting of [`add`].
///
/// # Errors
/// Fails if it cannot be removed.
pub fn remove(node: &Node, name: &str) -> Result<()> {
    let folder = folder(node, name);
    if !folder.exists() {
        return Ok(());
    }
    std::fs::remove_dir_all(&folder).at("remove", &folder)
}

fn folder(node: &Node, name: &str) -> PathBuf {
    render::node::registries(node).join(name)
}
