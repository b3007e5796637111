//! Tests of accounts.
#![allow(clippy::unwrap_used)]

use super::*;

#[test]
fn connection_strings_are_parsed() {
    let found = |text| AzureAccount::parse_connection_string(text).unwrap();
    let server = |text| found(text).endpoint.unwrap();
    let of_blobs = "https://x.blob.core.windows.net";
    assert_eq!(server("AccountName=x;AccountKey=a==;"), of_blobs);
    assert_eq!(found("AccountName=x;AccountKey=a==;").key.unwrap(), "a==");
    let gov = "accountname=x;AccountKey=a;EndpointSuffix=core.usgovcloudapi.net";
    assert_eq!(server(gov), "https://x.blob.core.usgovcloudapi.net");
    assert_eq!(server("DefaultEndpointsProtocol=http;AccountName=x")[..7], *"http://");
    let of_host = found("BlobEndpoint=https://x.blob.core.windows.net/;QueueEndpoint=q");
    assert_eq!(of_host.name_and_ending().unwrap(), ("x".into(), Some(DEFAULT_ENDING.into())));
    for bad in [
        "UseDevelopmentStorage=true",
        "AccountKey=secret",
        "AccountName=x;secret",
        "AccountName=x;Secret=secret",
        "AccountName=x;DefaultEndpointsProtocol=ftp",
        "AccountName=x;EndpointSuffix=a/secret",
        "AccountName=a/secret",
        "BlobEndpoint=https://example.org;SharedAccessSignature=secret",
    ] {
        let error = AzureAccount::parse_connection_string(bad).unwrap_err().to_string();
        assert!(error.contains("AZURE_STORAGE_CONNECTION_STRING: "), "{error}");
        assert!(!error.contains("secret"), "{error}");
    }
}

#[test]
fn credentials_match_their_own_account_only() {
    let gov = AzureAccount::parse_connection_string(
        "AccountName=x;EndpointSuffix=core.usgovcloudapi.net",
    )
    .unwrap();
    assert!(gov.belongs_to("x", None));
    assert!(gov.belongs_to("X", Some("core.usgovcloudapi.net")));
    assert!(!gov.belongs_to("x", Some(DEFAULT_ENDING)));
    assert!(!gov.belongs_to("y", None));
    let without_name = AzureAccount { signature: Some(String::new()), ..AzureAccount::default() };
    assert!(without_name.has_credentials_or_endpoint() && !without_name.belongs_to("x", None));
    let elsewhere = Some("http://127.0.0.1:10000/x".to_owned());
    let mine =
        AzureAccount { name: Some("x".into()), endpoint: elsewhere, ..AzureAccount::default() };
    assert!(mine.belongs_to("x", Some(DEFAULT_ENDING)));
}
