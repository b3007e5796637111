//! Failures of encrypted connections, with the advice that fits each.

use std::error::Error as StdError;
use std::io::{self, ErrorKind};
use std::time::{Duration, UNIX_EPOCH};

use rustls::pki_types::UnixTime;
use rustls::{AlertDescription, CertificateError, Error, InvalidMessage};

use super::Failure;
use crate::environment::{CLIENT_CERT, CLIENT_KEY};

/// The last second of the year 9999: later dates have no text.
const LAST_DATE: u64 = 253_402_300_799;

/// An error and its causes; the cause of an error of the system is the error that it carries.
pub fn causes<'e>(
    error: &'e (dyn StdError + 'static),
) -> impl Iterator<Item = &'e (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |&error| {
        match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
            Some(carried) => Some(carried),
            None => error.source(),
        }
    })
}

/// The failure of TLS among the causes of an error, if it is permanent; `hint` says how an authority
/// becomes trusted.
pub fn tls_failure(error: &(dyn StdError + 'static), hint: &str) -> Option<Failure> {
    let error = causes(error).find_map(|cause| cause.downcast_ref::<Error>())?;
    let what = match error {
        Error::InvalidCertificate(why) => {
            let advice = certificate_advice(why, hint);
            let what = format!("the server's certificate is not trusted: {error}; {advice}");
            return Some(Failure::permanent(ErrorKind::PermissionDenied, what));
        }
        Error::InvalidMessage(InvalidMessage::InvalidContentType) => format!(
            "the server does not use TLS at this port: {error}; its address may begin with http:// \
             (or redis://) in place of https:// (or rediss://)"
        ),
        Error::PeerIncompatible(_) => no_common_protocol(error),
        Error::AlertReceived(alert) => alert_message(*alert, error)?,
        _ => return None,
    };
    Some(Failure::permanent(ErrorKind::ConnectionAborted, what))
}

fn certificate_advice(why: &CertificateError, hint: &str) -> String {
    let clock = |time: &UnixTime| format!("the clock of this machine says {}", date(time));
    match why {
        CertificateError::ExpiredContext { time, not_after } => {
            format!("it has expired on {}, and {}", date(not_after), clock(time))
        }
        CertificateError::NotValidYetContext { time, not_before } => {
            format!("it is valid from {} on, and {}", date(not_before), clock(time))
        }
        CertificateError::NotValidForNameContext { presented, .. } if presented.is_empty() => {
            "it has no name that could be compared".to_owned()
        }
        CertificateError::NotValidForNameContext { .. } => {
            "use a name in the address that the certificate has".to_owned()
        }
        CertificateError::InvalidPurposeContext { .. } => "it is not for servers".to_owned(),
        CertificateError::UnknownIssuer => {
            format!("{hint}, or the server does not send the certificates between them")
        }
        _ => "the server needs another certificate".to_owned(),
    }
}

/// The message for what the server has found wrong.
fn alert_message(alert: AlertDescription, error: &Error) -> Option<String> {
    use AlertDescription as Alert;
    let [certificate, key] = [CLIENT_CERT.name, CLIENT_KEY.name];
    let setting = format!("{certificate} and {key} name the certificate that it is shown");
    match alert {
        Alert::ProtocolVersion | Alert::InsufficientSecurity => Some(no_common_protocol(error)),
        Alert::HandshakeFailure => {
            Some(format!("{}; or, if it asks for one, {setting}", no_common_protocol(error)))
        }
        // Seven kinds have the word in their name.
        of if matches!(of, Alert::UnknownCA | Alert::AccessDenied)
            || format!("{of:?}").contains("Certificate") =>
        {
            Some(format!("the server refuses the certificate of this client: {error}; {setting}"))
        }
        _ => None,
    }
}

fn no_common_protocol(error: &Error) -> String {
    format!(
        "the server has no protocol or cipher that is safe enough: {error}; expected TLS 1.2 or 1.3 \
         with ECDHE, and AES-GCM or ChaCha20"
    )
}

fn date(time: &UnixTime) -> String {
    httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(time.as_secs().min(LAST_DATE)))
}
