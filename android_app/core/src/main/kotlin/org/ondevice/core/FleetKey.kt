package org.ondevice.core

import java.io.ByteArrayOutputStream
import java.io.DataOutputStream
import java.io.File
import java.math.BigInteger
import java.security.GeneralSecurityException
import java.security.KeyFactory
import java.security.KeyPairGenerator
import java.security.PrivateKey
import java.security.Signature
import java.security.interfaces.ECPublicKey
import java.security.spec.ECGenParameterSpec
import java.security.spec.PKCS8EncodedKeySpec
import java.security.spec.X509EncodedKeySpec
import java.util.Base64

/** A signature and its signer's public key (DER); `Signed` of `ondevice/fleet/keys.py`. */
class FleetSignature(val signer: ByteArray, val signature: ByteArray)

/**
 * This phone's key, ECDSA on P-384. A charter that names its devices takes only replies that one of their keys signed.
 *
 * @property public in DER, as a SubjectPublicKeyInfo.
 */
class FleetKey private constructor(private val private: PrivateKey, val public: ByteArray) {
    /** Sign a reply that travels as a file. */
    fun sign(reply: ByteArray): FleetSignature {
        val signature = Signature.getInstance(ALGORITHM)
        signature.initSign(private)
        signature.update(DOMAIN)
        signature.update(reply)
        return FleetSignature(public, signature.sign())
    }

    /** Return the line of a `.pub` file, as `ondevice fleet begin --device-keys FOLDER` reads it. */
    fun openSsh(comment: String): String {
        val point = (KeyFactory.getInstance("EC").generatePublic(X509EncodedKeySpec(public)) as ECPublicKey).w
        val out = ByteArrayOutputStream()
        val data = DataOutputStream(out)
        for (part in listOf("ecdsa-sha2-$CURVE".toByteArray(), CURVE.toByteArray(), byteArrayOf(4) + fixed(point.affineX) + fixed(point.affineY))) {
            data.writeInt(part.size)
            data.write(part)
        }
        return "ecdsa-sha2-$CURVE ${Base64.getEncoder().encodeToString(out.toByteArray())} $comment\n"
    }

    private fun fixed(value: BigInteger): ByteArray {
        val bytes = value.toByteArray().dropWhile { it == 0.toByte() }.toByteArray()
        return ByteArray(COORDINATE_BYTES - bytes.size) + bytes
    }

    companion object {
        private val DOMAIN = "ondevice-fleet-answer-1\u0000".toByteArray()
        private const val ALGORITHM = "SHA256withECDSA"
        private const val CURVE = "nistp384"
        private const val COORDINATE_BYTES = 48

        private const val FILE_NAME = "fleet key.json"

        /** Read the key in the app's private folder; at the first call, make one. */
        fun open(home: File): FleetKey {
            val file = File(home, FILE_NAME)
            if (!file.isFile) {
                val pair = KeyPairGenerator.getInstance("EC").apply { initialize(ECGenParameterSpec("secp384r1")) }.generateKeyPair()
                val hex = mapOf("private" to Storage.hex(pair.private.encoded), "public" to Storage.hex(pair.public.encoded))
                Storage.atomicWrite(file, Json.write(hex))
            }
            try {
                val value = Json.parse(Storage.decode(file.readBytes())) as Map<*, *>
                val private = KeyFactory.getInstance("EC").generatePrivate(PKCS8EncodedKeySpec(Storage.bytes(value["private"] as String)))
                return FleetKey(private, Storage.bytes(value["public"] as String))
            } catch (error: Exception) {
                if (error is GeneralSecurityException || error is RuntimeException) {
                    throw fleetError("${file.name} is not this phone's key", hint = "delete the app's data to make a new one")
                }
                throw error
            }
        }
    }
}
