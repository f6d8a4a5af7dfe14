//! Documents of the aggregated API that are not subresources.
//!
//! - [`documents`]: discovery, from the registry of subresources; [`openapi`]: OpenAPI 2 and 3, from the same registry.
//! - [`guestfs`]: the image of the libguestfs tools; [`cluster_profiler`]: profiles of all components.

pub(crate) mod cluster_profiler;
pub(crate) mod documents;
pub(crate) mod guestfs;
mod openapi;
