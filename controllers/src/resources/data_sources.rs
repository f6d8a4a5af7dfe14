//! DataSources of CDI: named sources of DataVolumes, such as the newest version of an image.

use api::cdi::DataSource;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::declaration::Declaration;
use crate::{
    cache::{Cached, Presence, trim_meta},
    runtime::Kind,
};

impl Cached for DataSource {
    type Index = ();

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn trim(&mut self) {
        trim_meta(&mut self.metadata);
    }
}

impl Declaration for DataSource {
    type Wire = Self;
    type Kept = Self;
    const PRESENCE: Presence = Presence::WhenServed;
    const WRITTEN: Option<Kind> = Some(Kind::DataSource);
}
