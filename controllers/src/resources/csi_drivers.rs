//! CSI drivers. A driver makes a volume from the data source of its claim, or reports that it cannot. Other provisioners may ignore
//! the data source and make an empty volume.

use k8s_openapi::{api::storage::v1::CSIDriver, apimachinery::pkg::apis::meta::v1::ObjectMeta};

use super::metadata::slim;

/// A CSI driver, which has the name of its provisioner.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CachedCsiDriver {
    /// Metadata, reduced.
    pub metadata: ObjectMeta,
}

unindexed!(CachedCsiDriver);

kept!(CachedCsiDriver of CSIDriver);

impl From<CSIDriver> for CachedCsiDriver {
    fn from(driver: CSIDriver) -> Self {
        Self { metadata: slim(driver.metadata) }
    }
}
