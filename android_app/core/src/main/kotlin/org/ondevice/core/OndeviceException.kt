package org.ondevice.core

/** Which part of the work refused; the names are those of `ondevice/errors.py`. */
enum class ErrorKind(val errorName: String, val exitCode: Int) {
    CONFIG("ConfigError", 2),
    DATA("DataError", 3),
    MODEL("ModelError", 4),
    ARTIFACT("ArtifactError", 5),
    CHECKPOINT("CheckpointError", 6),
    BUSY("BusyError", 7),
    TRAINING("TrainingError", 9),
    STORAGE("StorageError", 11),
    FLEET("FleetError", 14),
}

/**
 * A mistake or a condition that the user can act on.
 *
 * @property what one sentence that says what went wrong, with file, line and field if known.
 * @property expected what would have been right.
 * @property received what was found instead.
 * @property hint what to try next.
 */
class OndeviceException(
    val kind: ErrorKind,
    val what: String,
    val expected: String? = null,
    val received: String? = null,
    val hint: String? = null,
    cause: Throwable? = null,
) : Exception(text(what, expected, received, hint), cause) {

    /** The error as the JSON object that the Python side's `--json` prints. */
    fun toJson(): Map<String, Any?> = linkedMapOf(
        "error" to kind.errorName,
        "message" to what,
        "expected" to expected,
        "received" to received,
        "try" to hint,
        "exit_code" to kind.exitCode,
    )

    private companion object {
        fun text(what: String, expected: String?, received: String?, hint: String?): String {
            val lines = mutableListOf(what)
            expected?.let { lines += "  expected: $it" }
            received?.let { lines += "  received: $it" }
            hint?.let { lines += "  try: $it" }
            return lines.joinToString("\n")
        }
    }
}

internal fun artifactError(what: String, expected: Any? = null, received: Any? = null, hint: String? = null) =
    OndeviceException(ErrorKind.ARTIFACT, what, expected?.toString(), received?.toString(), hint)

internal fun dataError(what: String, expected: Any? = null, received: Any? = null, hint: String? = null) =
    OndeviceException(ErrorKind.DATA, what, expected?.toString(), received?.toString(), hint)

internal fun configError(what: String, expected: Any? = null, received: Any? = null, hint: String? = null) =
    OndeviceException(ErrorKind.CONFIG, what, expected?.toString(), received?.toString(), hint)

internal fun storageError(what: String, received: Any? = null, hint: String? = null, cause: Throwable? = null) =
    OndeviceException(ErrorKind.STORAGE, what, null, received?.toString(), hint, cause)
