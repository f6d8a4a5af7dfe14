//! DataVolumes of CDI. Without CDI, the importer of Ferrovirt carries them out.

use api::cdi::DataVolume;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::declaration::Declaration;
use crate::{
    cache::{Cached, Presence, trim_meta},
    runtime::Kind,
};

impl Cached for DataVolume {
    type Index = ();

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn trim(&mut self) {
        trim_meta(&mut self.metadata);
    }
}

impl Declaration for DataVolume {
    type Wire = Self;
    type Kept = Self;
    const PRESENCE: Presence = Presence::WhenServed;
    const WRITTEN: Option<Kind> = Some(Kind::DataVolume);
}
