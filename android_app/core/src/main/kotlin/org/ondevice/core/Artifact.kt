package org.ondevice.core

import java.io.File

/** An artifact's folder with its checked manifest. */
class Artifact(val folder: File, val manifest: Manifest) {
    val programFile: File get() = File(folder, manifest.program)

    /** The tokenizer that the program was made for; reading it takes a moment, keep it. */
    fun tokenizer(): Tokenizer = TokenizerFile.read(File(folder, TOKENIZER_FOLDER))

    companion object {
        const val TOKENIZER_FOLDER = "tokenizer"
        const val TOKENIZER_FILE = "$TOKENIZER_FOLDER/tokenizer.json"

        /**
         * Open and check an artifact.
         *
         * @param checkFiles hash every file; needed once after a copy, a moment for each 100 MB.
         * @param linkedOps this project's own ops that the app's runtime links; empty for the stock AAR.
         * @throws OndeviceException [ErrorKind.ARTIFACT], see [ManifestReader.read] and [Manifest.requireOps].
         */
        fun open(folder: File, checkFiles: Boolean = true, linkedOps: Set<String> = emptySet()): Artifact {
            val manifest = ManifestReader.read(folder, checkFiles)
            manifest.requireOps(linkedOps)
            return Artifact(folder, manifest)
        }
    }
}
